"""Which tests of engines can run here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make test-engines has it")
