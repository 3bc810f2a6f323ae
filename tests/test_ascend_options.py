"""Options of Huawei's compiler as config keys: legal on an NPU, refused wherever else one runs."""

from __future__ import annotations

import pytest

from tkernels import config, device
from tkernels.ascend_options import ASCEND_OPTIONS
from tkernels.registry import KernelSpec, all_kernels

OPTIONS = [(name, values[1]) for name, values in ASCEND_OPTIONS.items()]
each_spec = pytest.mark.parametrize("spec", all_kernels().values(), ids=lambda spec: spec.name)


@each_spec
def test_every_kernel_takes_them_on_an_npu_alone(spec: KernelSpec) -> None:
    problem = spec.cases[0].problem
    for arch, taken in [("ascend910b", True), ("sm90", False)]:
        dev = device.offline_facts(arch)
        plain = spec.default_config(problem, dev)
        assert config.why_unusable(spec, plain, problem, dev) is None
        for name, value in OPTIONS:
            reason = config.why_unusable(spec, {**plain, name: value}, problem, dev)
            assert (reason is None) == taken, (arch, name, reason)
            assert taken or f"unknown key {name} (expected" in str(reason)


@pytest.mark.skipif(device.current().is_npu, reason="an NPU takes the options")
@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_this_device_refuses_them(name: str, value: object) -> None:
    spec = all_kernels()["rms_norm"]
    problem = spec.cases[0].problem
    plain = spec.default_config(problem, device.current())
    with pytest.raises(ValueError, match=f"unknown key {name}"):
        config.explain(spec, problem, {**plain, name: value})


def test_the_option_that_removes_needed_synchronisation_is_not_one() -> None:
    assert "disable_auto_inject_block_sync" not in ASCEND_OPTIONS
    assert all(values[0] is None for values in ASCEND_OPTIONS.values())  # the compiler's own choice
