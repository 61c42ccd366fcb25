"""Lightning's promises under flowtrain, each with a real Trainer and real processes."""
