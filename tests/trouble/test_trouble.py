"""Each trouble case on real ranks under zfx ends as it should: a right result, or a clear error on every rank, in time."""

from __future__ import annotations

from typing import Any

import pytest

from .cases import REGISTRY, options_of
from .runner import DEFAULT_LIMITS, Report, problems, run_case

# Cases that should match and for now do not: (start of the report, why). A case that is mended fails here.
KNOWN_FAULTS: dict[str, tuple[str, str]] = {}

# What other tests show in one job of their own, or what is torch's alone.
SLOW = {
    "step_while_gradients_wait", "part_of_a_model_called", "part_as_a_function", "pickled_model", "weight_under_two_parameters",
    "old_style_norm_outermost", "foreach_norms_and_schedulers", "fused_adamw", "adafactor", "lora_from_peft", "leaf_under_autocast",
    "lstm_under_autocast", "backward_hook_on_a_part", "no_sync_first_used_last", "selective_checkpoint", "peers_module_in_a_loop",
    "peers_extra_path_each_second_step", "peers_frozen_several_forwards", "peers_checkpoint_of_frozen_and_trained",
    "peers_order_changes_every_step", "peers_no_grad_in_train_mode", "peers_containers", "peers_late_module",
}

# The others run only with limits under which every parameter is released after every use.
WITH_DEFAULT_LIMITS = (
    "tied_embed_head", "shared_block_recursive", "uneven_numel", "two_forwards_then_two_backwards", "grad_accum_4",
)


def runs() -> list[Any]:
    found = []
    for case_id, case in REGISTRY.items():
        for world in options_of(case.build()[3])["world_sizes"]:
            marks = (pytest.mark.slow,) if world > 2 or case_id in SLOW else ()
            found.append(pytest.param(case_id, world, marks=marks, id=f"{case_id}-{world}"))
    return found


def check(report: Report) -> None:
    if report.case_id in KNOWN_FAULTS:
        start, reason = KNOWN_FAULTS[report.case_id]
        assert str(report).startswith(start), f"mended, or worse: {report} (was: {reason})"
        return
    if wrong := problems(report):
        pytest.fail("\n".join([str(report), *wrong, *(str(x) for x in report.outcomes if x.status != "ok")]), pytrace=False)


@pytest.mark.parametrize(("case_id", "world_size"), runs())
def test_case_ends_as_it_should(case_id: str, world_size: int) -> None:
    check(run_case(case_id, world_size))


@pytest.mark.parametrize("case_id", WITH_DEFAULT_LIMITS)
def test_default_limits(case_id: str) -> None:
    check(run_case(case_id, 2, DEFAULT_LIMITS))


def test_known_faults_are_cases() -> None:
    assert KNOWN_FAULTS.keys() | SLOW <= REGISTRY.keys()
