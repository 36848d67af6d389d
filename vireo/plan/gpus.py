"""GPUs by name: their memory, and how fast they multiply matrices."""

from __future__ import annotations

from dataclasses import dataclass

# Measured on an H200: 753e12 operations a second in large bfloat16 products, of the 989e12 of its
# data sheet. Of the others nothing was measured: the same share is assumed.
REACHED = 753 / 989


@dataclass(frozen=True)
class Gpu:
    """Memory in GB (1e9 bytes; cards have some percent more), and dense bfloat16 operations a
    second in units of 1e12, both of NVIDIA's data sheets, without sparsity."""

    name: str
    memory_gb: int
    sheet: float

    @property
    def rate(self) -> float:
        """Operations a second in large matrix products."""
        return self.sheet * 1e12 * REACHED


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80, 312),  # A100 80GB SXM, data sheet of 2021
        Gpu("h100", 80, 989),  # H100 SXM, data sheet of 2023: 1,979 with sparsity
        Gpu("h200", 141, 989),  # H200 SXM, data sheet of 2024: 1,979 with sparsity
        Gpu("b200", 180, 2250),  # HGX B200, data sheet of 2024: 4,500 with sparsity
    )
}
