"""The pool of trouble cases: `REGISTRY` maps an id to a `Case`. One file per kind; `common.py` says what a case is."""

from . import around, layout, loop, passes, peers, setup, sharing, state, usage
from .common import DEFAULTS, REGISTRY, Case, micro_seed, options_of

KINDS = (sharing, layout, usage, state, passes, loop, setup, around, peers)

__all__ = ["DEFAULTS", "KINDS", "REGISTRY", "Case", "micro_seed", "options_of"]
