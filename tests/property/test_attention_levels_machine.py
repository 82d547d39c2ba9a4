"""Attention windows with levels below the device under hypothesis: what a window shares is copied,
stored and loaded as any prefix, and what lies behind it never.

Fake levels compare each slot and record with the tokens that it is kept under, and the token oracle
finds a load that brought another prefix.
"""

from __future__ import annotations

from tests.property.machine_runs import case
from tests.property.test_attention_machine import AttentionMachine
from tests.property.test_levels_machine import LevelsMachine


class AttentionLevelsMachine(AttentionMachine, LevelsMachine):
    """The levels machine, in which two of three requests have an attention window."""


TestAttentionLevelsMachine = case(AttentionLevelsMachine)
