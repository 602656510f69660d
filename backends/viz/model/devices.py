"""Peak FLOPs and memory bandwidth of devices, from data sheets (dense), for the roofline.

H100, H200    NVIDIA H100 and H200 Tensor Core GPU data sheets, SXM: half of the f16 and bf16 peaks with sparsity
A100          NVIDIA A100 80 GB data sheet, SXM
RTX 4090      NVIDIA Ada GPU Architecture white paper, appendix A: tensor cores that add up in f32
Laptop CPU    AMD Ryzen 7 7840U: 8 cores at 3.3 GHz, each two fused multiply-adds of 256 bits a cycle (32 FLOPs in f32,
              double in bf16 by AVX512_BF16); 128 bits of LPDDR5X-7500

f32 is the rate of the ordinary units, not TF32. Real programs reach less: about 0.8 of the FLOPs in large products and
0.9 of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPES = {"f16": 2, "bf16": 2, "f32": 4}  # bytes per element
TOKENS = 512  # sequence length, as in `weft inspect`


@dataclass(frozen=True)
class Device:
    """A device for the roofline (Williams 2009): FLOP/s in f16 or bf16 (`half`) and f32 (`single`), memory bytes/s."""

    name: str
    half: float
    single: float
    memory: float

    def rate(self, dtype: str) -> float:
        """Return the peak FLOP/s of the device in `dtype`, one of `DTYPES`."""
        return self.single if dtype == "f32" else self.half


DEVICES = (
    Device("H100", 989.5e12, 67e12, 3.35e12),
    Device("H200", 989.5e12, 67e12, 4.8e12),
    Device("A100", 312e12, 19.5e12, 2.039e12),
    Device("RTX 4090", 165.2e12, 82.6e12, 1.008e12),
    Device("Laptop CPU", 1.69e12, 0.845e12, 0.12e12),
)


def list_devices() -> dict[str, Any]:
    """Return the JSON data of the roofline: default tokens, bytes per dtype, and peaks of each device."""
    return {
        "tokens": TOKENS,
        "dtypes": DTYPES,
        "devices": {d.name: {"rates": {t: d.rate(t) for t in DTYPES}, "memory": d.memory} for d in DEVICES},
    }
