"""Every instruction set gives the recurrent ops the same bits, and one can be chosen."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from apcbatch.config import Config
from apcbatch.kernels.processor import isa, set_isa
from csrc.build_flags import FOLDER, instruction_sets, isa_flags
from tests.effort import table
from tests.kernels.recurrent import DTYPES, Conv, Scan, assert_isas_change_no_bit, ragged
from tests.kernels.test_vmath import EXP, EXP2, LOG1P_UNIT, SIGMOID, SILU, SOFTPLUS, apply


@table("op, size", [(Scan, 1), (Scan, 8), (Scan, 16), (Scan, 23), (Conv, 4)])
@table("dtype", DTYPES)
def test_bits_of_the_recurrent_ops(every_isa, dtype, op, size):
    """An operation that one instruction set contracts, reorders, or does in a scalar way at the tail."""
    inputs = op.random(70, 21, size, dtype)
    if op is Scan:
        inputs.dt[:, 5] = 60.0  # beyond the bound of the shorter power
    start = inputs.arena(3)
    batch = ragged([65, 5], [0, -1], [0, 1], [[(7, 2)], []])
    assert_isas_change_no_bit(inputs, start, batch, every_isa)


@table("function", [EXP, EXP2, LOG1P_UNIT, SOFTPLUS, SILU, SIGMOID])
def test_function_bits(every_isa, function):
    """The same for each elementwise function, over all bit patterns; NaN may differ in its payload."""
    generator = np.random.default_rng(random.getrandbits(31))
    values = generator.integers(0, 2**32, 20_001, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, generator.uniform(-110, 110, 20_001).astype(np.float32)])
    if function == LOG1P_UNIT:
        values = generator.uniform(0, 1, 20_001).astype(np.float32)
    results = []
    for name in every_isa:
        set_isa(name)
        results.append(np.nan_to_num(apply(function, values), nan=123.0, posinf=np.inf, neginf=-np.inf))
    for result in results:
        assert result.tobytes() == results[0].tobytes()


def test_choosing(every_isa):
    """An instruction set that is not the one asked for, or one accepted that this processor lacks."""
    widens = every_isa[-1] == "avx512bf16" and "AuthenticAMD" not in Path("/proc/cpuinfo").read_text()
    assert "plain" in every_isa and isa() == ("avx512" if widens else every_isa[-1])
    for name in every_isa:
        set_isa(name)
        assert isa() == name
    with pytest.raises(ValueError, match="one of those of this processor, plain"):
        set_isa("neon")
    assert isa() == every_isa[-1]


def test_the_build_and_the_options_follow_one_list(every_isa):
    """A row of csrc/instruction_sets.h that the build, the module or the option `isa` does not know."""
    names = list(instruction_sets())
    assert names[0] == "plain" and every_isa == [name for name in names if name in every_isa]
    spec = next(field.metadata["spec"] for field in fields(Config) if field.name == "isa")
    assert list(spec.choices) == names[::-1]
    for name in names:
        features = [flag.removeprefix("-m") for flag in isa_flags(f"gemm_{name}.cpp", "x86_64")[1:]]
        assert features == instruction_sets()[name] and (FOLDER / f"gemm_{name}.cpp").exists()
    assert instruction_sets()["avx2"] == ["avx2", "fma"]
    assert isa_flags("scan_avx2.cpp", "aarch64") == isa_flags("dispatch.cpp", "x86_64") == []
