"""The actor of changes that a test makes itself, for the audit log."""

from __future__ import annotations

from tenancy.storage.audit_log import Actor

TESTER = Actor("command", "tester", 1_000)
