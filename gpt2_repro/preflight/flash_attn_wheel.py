"""Print the URLs of prebuilt flash-attn wheels that may work on this machine.

    python -m gpt2_repro.preflight.flash_attn_wheel

The most likely URL comes first. Import flash_attn after the installation to check that the wheel works.
"""

import platform
import sys


RELEASES = "https://github.com/Dao-AILab/flash-attention/releases/download"
VERSIONS = ("2.8.3.post2", "2.8.3.post1", "2.8.3")
BUILT_FOR = ((2, 6), (2, 7), (2, 8), (2, 9), (2, 10))  # torch versions (flash-attn, .github/workflows/publish.yml)
# No wheel works with torch 2.13 (unslothai/unsloth, pull request 7495).
LOADS_WHEEL_OF = {(2, 11): (2, 10), (2, 12): (2, 10)}


def wheels(*, torch: str, cuda: str | None, cxx11_abi: bool, python: tuple[int, int], machine: str) -> list[str]:
    """Return the URLs of the wheels that may work, or [] if no wheel can work.

    Args:
        torch: version of torch, such as `2.9.1+cu128`.
        cuda: version of CUDA that torch was built for, such as `12.8`; None for a CPU build.
        machine: machine type, `x86_64` or `aarch64`.
    """
    major, minor = (int(part) for part in torch.split("+")[0].split(".")[:2])
    built_for = LOADS_WHEEL_OF.get((major, minor), (major, minor))
    if cuda is None or built_for not in BUILT_FOR or not (3, 10) <= python <= (3, 13):
        return []
    abi = "TRUE" if cxx11_abi else "FALSE"
    tag = f"cp{python[0]}{python[1]}"
    # File name of a wheel as in flash-attn's setup.py.
    built = f"cu{cuda.split('.')[0]}torch{built_for[0]}.{built_for[1]}cxx11abi{abi}-{tag}-{tag}-linux_{machine}"
    return [f"{RELEASES}/v{version}/flash_attn-{version}%2B{built}.whl" for version in VERSIONS]


def main() -> None:
    """Print the URLs of the wheels for this machine, one per line."""
    import torch

    found = wheels(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cxx11_abi=torch.compiled_with_cxx11_abi(),
        python=sys.version_info[:2],
        machine=platform.machine(),
    )
    sys.stdout.write("".join(f"{wheel}\n" for wheel in found))


if __name__ == "__main__":
    main()
