"""Tables of pruning, from made-up rows."""

from experiments.characterize.report import build
from experiments.pruning import tables
from tests.experiments.test_readme import lines_of

CALL = {"gpu": "NVIDIA H100", "workload": "mamba2", "preset": "1.3b", "kind": "states", "variant": "auto", "dtype": "bf16",
        "batch": 1}
WHOLE = {**CALL, "part": "step", "mode": "step", "seqlen": 4096, "ratio": 0.0, "p50_us": 1200.0, "peak_mib": 1000.0,
         "weights_mib": 500.0}
RUN = {"workload": "mamba2", "preset": "130m", "mixer": "ssd", "steps": 200, "variant": "auto"}


def make_loss(score: str, seed: int, loss: float) -> dict:
    return {"gpu": "NVIDIA H100", "run": RUN | {"seed": seed}, "kind": "states", "ratio": 0.5, "score": score, "finetune": 20,
            "loss_whole": 4.0, "loss_pruned": loss + 1, "loss_bridged": None, "loss": loss}


def test_times_and_memory():
    half, call = WHOLE | {"ratio": 0.5, "p50_us": 1000.0, "peak_mib": 800.0}, WHOLE | {"part": "mamba2", "mode": "fwd"}
    written = tables.tabulate_speed([WHOLE, half, call, call | {"ratio": 0.5, "graph_p50_us": 900.0, "weights_mib": 250.0}])
    of_block, of_step = lines_of(written)[2:]
    assert of_block[3:] == ["50.0% of the states", "900", "1.33", "1,250", "16.7%"]
    assert of_step == ["training step 1.3b, H100", "step", "4,096", "50.0% of the states", "1,000", "1.20", "800", "20.0%"]
    assert "Of 2 lines with states removed, 2 reach both; without 50.0% of the states it is at most 1.33 times" in written
    slower = tables.tabulate_speed([WHOLE, half | {"p50_us": 1100.0}])
    assert "The paper says 1.14 times as fast with 11.5% less memory. Of 1 lines with states removed, 0 reach both;" in slower
    assert "without 50.0% of the states it is at most 1.09 times as fast, with 20.0% less memory." in slower
    assert "No rows yet" in tables.tabulate_speed([half])


def test_losses_and_what_a_random_choice_loses():
    rows = [make_loss("random", 0, 5.0), make_loss("random", 1, 5.2), make_loss("activity", 0, 4.1),
            make_loss("activity", 1, 4.2), make_loss("magnitude", 0, 4.9), make_loss("magnitude", 1, 5.2),
            make_loss("none", 0, 4.0) | {"ratio": 0.0}]
    written = tables.tabulate_losses(rows)
    assert lines_of(written)[2] == ["mamba2 130m (ssd), 200 steps, 20 of fine-tuning", "50.0% of the states", "activity", "2",
                                    "4.000", "5.150", "", "4.150", "", "0.9500 (0.9000 to 1.0000)"]
    whole = [make_loss("none", seed, 3.9 + seed / 10) | {"ratio": 0.0} for seed in range(2)]
    assert lines_of(tables.tabulate_losses(rows + whole))[2][-2] == "3.950"
    assert "between seeds. Just pruned: activity; not magnitude. At the end: activity; not magnitude." in written
    assert "better" not in tables.tabulate_losses(rows[:1] + rows[2:3]) and "No rows yet" in tables.tabulate_losses([])


def test_the_step_that_gains_most_stands_beside_the_paper():
    made = {"bench": "prune_speed", "git_sha": "0" * 40}
    rows = [made | WHOLE, *(
        made | WHOLE | {"ratio": ratio, "p50_us": us, "peak_mib": 800.0} for ratio, us in ((0.25, 1100.0), (0.5, 1000.0)))]
    text = build.render(build.collect(rows))
    assert "| 1.20 times |" in text and "the training step 1.3b of 4096 tokens without 50.0% of the states" in text
    assert "| 20.0 % |" in text and "1.20 times" not in build.render(build.collect(rows[:1]))
