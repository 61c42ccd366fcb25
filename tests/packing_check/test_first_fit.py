"""A fit checks its module before the first step, on whatever strategy, and says or refuses what it finds."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch

import flowtrain_lightning as flow
from flowtrain_lightning.packing_check import PackingCheckError
from tests.forks import Job, run_jobs
from tests.packing_check.fitting import trainer_of_a_step
from tests.packing_check.wrong_modules import ClipsInAHook, DropsByFunction, NormalisesByBatch, SeesAll
from tests.tiny import TinyVLM, tiny_data, write_records

pytestmark = pytest.mark.checks_packing


def fit(folder: Any, module: flow.FlowModule, strategy: Any = "auto", **settings: Any) -> L.Trainer:
    trainer = trainer_of_a_step(folder, strategy)
    trainer.fit(module, tiny_data(folder, **settings))
    return trainer


@pytest.fixture
def folder(tmp_path):
    write_records(tmp_path, 16)
    return tmp_path


@pytest.mark.parametrize("strategy", ["auto", "flowtrain"])
def test_a_module_that_mixes_samples_is_refused_before_its_first_step(folder, strategy):
    module = SeesAll()
    with pytest.raises(PackingCheckError, match=r"SeesAll does not learn .*\n- merge or backbone: a sample sees"):
        fit(folder, module, strategy)
    assert not list(module.parameters()), "nothing was built"


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ({"encoder_ranks": 1}, 2),
        pytest.param("ddp", 2, marks=pytest.mark.full),
        pytest.param({"placement": "colocated"}, 2, marks=pytest.mark.full),
        pytest.param({}, 2, marks=pytest.mark.full),
        pytest.param({"placement": "mixed"}, 3, marks=pytest.mark.full),
    ],
    ids=["separate", "ddp", "colocated", "planned", "mixed"],
)
def test_all_ranks_refuse_it_alike(tmp_path, strategy, ranks):
    arguments = {"module": "SeesAll", "strategy": strategy, "ranks": ranks}
    job = Job("fit", "tests.packing_check.fitting:fit", ranks, arguments)
    done = run_jobs(tmp_path, [job])["fit"].check()
    texts = {(done.folder / f"refused{rank}.txt").read_text() for rank in range(ranks)}
    assert len(texts) == 1
    assert "merge or backbone: a sample sees the tokens of others" in texts.pop()


def test_what_couples_names_is_told_and_trains(folder, caplog):
    strategy = flow.FlowTrainStrategy(couples=["batch_norm"])
    assert fit(folder, NormalisesByBatch(), strategy).global_step == 1
    assert "samples are coupled, as couples says. encode: encoder.norm" in caplog.text

    class Named(NormalisesByBatch):
        couples = ("batch_norm",)

    assert fit(folder, Named(), "auto").global_step == 1
    with pytest.raises(PackingCheckError, match=r"FlowTrainStrategy\(couples=\['batch_norm'\]\)"):
        fit(folder, NormalisesByBatch(), "auto")


def test_naming_one_coupling_hides_no_other(folder):
    class Both(DropsByFunction, SeesAll):
        couples = ("random",)

    with pytest.raises(PackingCheckError, match="sees the tokens of others"):
        fit(folder, Both())


def test_names_that_mean_nothing_are_refused_where_they_are_given():
    with pytest.raises(ValueError, match="couples has 'dropout'; what may couple samples is 'random', 'batch_norm'"):
        flow.FlowTrainStrategy(couples=["dropout"])
    with pytest.raises(ValueError, match=r"give a list, such as couples=\['loss'\]"):
        flow.FlowTrainStrategy(couples="loss")


def test_a_right_module_is_told_of_once_and_its_result_is_kept(folder, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    fit(folder, TinyVLM())
    assert caplog.text.count("packed equals alone: ") == 1
    caplog.clear()
    fit(folder, TinyVLM())
    assert "packed equals alone" not in caplog.text, "the next start finds what was found"
    fit(folder, TinyVLM(lr=0.5))
    assert "packed equals alone" in caplog.text, "another setting is another module"
    caplog.clear()
    fit(folder, TinyVLM(), token_budget=200)
    assert "packed equals alone" in caplog.text, "other steps, too"


def test_a_refused_module_is_refused_by_what_is_kept_too(folder):
    start = time.process_time()
    for _ in range(2):
        with pytest.raises(PackingCheckError, match="A hook"):
            fit(folder, ClipsInAHook())
    assert time.process_time() - start < 60


class NeedsTraining(TinyVLM):
    def merge(self, batch: Any, features: Any) -> Any:
        if not self.trainer.optimizers:
            raise RuntimeError("only in a run")
        return super().merge(batch, features)


class LearnsNothing(TinyVLM):
    def loss(self, outputs: Any, batch: Any) -> Any:
        loss, count = super().loss(outputs, batch)
        return 0 * loss, count


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            NeedsTraining,
            r"the check ended with RuntimeError \(test_first_fit.py:\d+\): only in a run. Training goes on",
        ),
        pytest.param(
            LearnsNothing, r"the loss of each of \d samples is 0, and so is every gradient", marks=pytest.mark.full
        ),
    ],
)
def test_a_check_that_proves_nothing_says_so_at_each_start_and_the_run_goes_on(folder, module, why):
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"NOTHING IS PROVEN of whether {module.__name__} learns .*{why}"):
            assert fit(folder, module()).global_step == 1


def test_by_hand_too_nothing_is_proven_where_nothing_is_learned(folder):
    (said,) = flow.check(LearnsNothing(), tiny_data(folder))
    assert said.startswith("nothing is proven: the loss of each of")
    with pytest.raises(RuntimeError, match="only in a run"):
        flow.check(NeedsTraining(), tiny_data(folder))


def test_checking_changes_nothing_of_the_run(folder):
    runs = []
    for named in (False, True):
        L.seed_everything(3, verbose=False)
        module = TinyVLM()
        if named:
            module.mark_checked()
        fit(folder, module)
        runs.append([weight.clone() for weight in module.parameters()] + [torch.rand(3)])
    assert all(map(torch.equal, *runs))
