"""The URLs of flash-attn wheels match the file names in the flash-attn releases."""

from typing import Any

from gpt2_repro.preflight.flash_attn_wheel import RELEASES, wheels


def wheels_of(torch: str, **changed: Any) -> list[str]:
    return wheels(torch=torch, **{"cuda": "12.8", "cxx11_abi": True, "python": (3, 12), "machine": "x86_64"} | changed)


def test_names_follow_the_machine() -> None:
    # For RunPod's image with torch 2.9.1; this file name is in three independent logs.
    name = "v2.8.3/flash_attn-2.8.3%2Bcu12torch2.9cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"
    assert f"{RELEASES}/{name}" in wheels_of("2.9.1+cu128")
    for found, part in (
        (wheels_of("2.6.0+cu124", cuda="12.4", cxx11_abi=False), "cu12torch2.6cxx11abiFALSE-cp312"),
        (wheels_of("2.10.0+cu130", cuda="13.0"), "cu13torch2.10cxx11abiTRUE"),
        (wheels_of("2.12.1"), "torch2.10cxx11abi"),
        (wheels_of("2.9.1", python=(3, 10), machine="aarch64"), "cp310-cp310-linux_aarch64.whl"),
    ):
        assert len(found) == 3 and all(part in wheel for wheel in found)
        assert "2.8.3.post2" in found[0] and "/v2.8.3/" in found[-1]


def test_where_none_fits_there_is_none() -> None:
    assert wheels_of("2.13.0") == wheels_of("2.5.1") == []
    assert wheels_of("2.9.1", cuda=None) == wheels_of("2.9.1", python=(3, 14)) == []
