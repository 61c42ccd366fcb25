"""Placement: which allocation a run takes, and why.

`request` is what the user says; `choose_allocation` finds the answer where that leaves it open, before roles are
assigned: by what binds the run, by a plan, or by a rule of thumb. A plan needs a `profile` of the module, which
`measuring_process` gets for a run and `module_profile` makes; `measured` predicts steps by it, for the planner of
`flowtrain_lightning.allocator`, and `simulation` shows where their time goes. Planning, simulating and reading a
profile need neither torch nor Lightning; importing this package does not import them.
"""
