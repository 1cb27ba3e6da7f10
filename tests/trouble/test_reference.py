"""The pool is sound: each case trains, does what it declares, and is deterministic, without any sharding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from .cases import REGISTRY, Case, options_of
from .reference import compare, run


def none_grads(expectation: dict[str, Any], step: int) -> tuple[str, ...]:
    names = expectation.get("none_grads", ())
    return names.get(step, ()) if isinstance(names, dict) else names


def num_finished_steps(o: dict[str, Any]) -> int:
    if o["raises"]:
        return o["raises"][1]
    return min(o["batches_per_rank"](r) for r in range(2)) if o["batches_per_rank"] else o["steps"]


@pytest.mark.parametrize("case", REGISTRY.values(), ids=REGISTRY.keys())
def test_reference_does_what_the_case_declares(case: Case) -> None:
    parts = case.build()
    o, expectation = options_of(parts[3]), parts[4]
    res, again = run(case, 2), run(case, 2)
    assert not compare(res, again, 0.0), "not deterministic"
    assert len(res["losses"]) == num_finished_steps(o)
    assert o["nonfinite_ok"] or all(math.isfinite(x) for xs in res["losses"] for x in xs)
    if expectation.get("check"):
        expectation["check"](res)
    for step, grads in enumerate(res["grads"]):
        assert all(grads[name] is None for name in none_grads(expectation, step)), "a gradient that should be None is not"
    start = parts[0]()
    if o["init_fn"]:
        o["init_fn"](start)
    moved = {n for n, p in start.named_parameters() if p.numel() and not torch.equal(p, res["params"][n])}
    trained = {n for grads in res["grads"] for n, g in grads.items() if g is not None and g.abs().sum() > 0}
    assert trained and moved <= trained, f"moved without a gradient: {moved - trained}"


def test_compare_notices_what_differs() -> None:
    case = REGISTRY["buffer_mutated_and_returned"]
    res = run(case, 2)
    assert not compare(res, run(case, 2), 0.0)
    for key, change in {
        "losses": [[0.0, 0.0]] * 3,
        "grads": [{**g, "lin.weight": None} for g in res["grads"]],
        "params": {**res["params"], "lin.bias": res["params"]["lin.bias"] + 1e-9},
        "buffers": res["buffers"][::-1],
        "skipped": [True, False, False],
        "state_keys": [],
    }.items():
        assert any(line.startswith(key) for line in compare(res, {**res, key: change}, 1e-10)), key
