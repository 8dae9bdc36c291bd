"""Cards of desktops and workstations beyond those of other_cards.py, by their cores and boost clocks; rules as in catalogue.py.

A core does two FLOPs of float32 a clock, and tensor cores so many times as much (white papers of Turing, GA102, Ada and
RTX Blackwell): 8 of fp16 with sums in float32 in Turing and 4 in Ampere and Ada, of which GeForce cards do half.
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.hardware.entry import CatalogueEntry, one_page

GEFORCE = "NVIDIA, GeForce graphics cards compared (cores, boost clock, memory), https://www.nvidia.com/en-us/geforce/graphics-cards/compare/"
WORKSTATION = "NVIDIA, RTX graphics cards for workstations, data sheets (cores, float32, memory), https://www.nvidia.com/en-us/products/workstations/"
TURING = "NVIDIA Turing GPU architecture white paper, tables of the RTX 2080, RTX 2070 and Quadro RTX 6000, https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf"
# What products of torch reach on cards of many kinds, as their owners measured: a step's large products 0.93 of the best of
# a card that keeps its clock (other_cards.py), and of those of 8192 and more where its power does not let it.
TORCH_PRODUCTS = "products of fp16 and bf16 by torch on many cards, https://github.com/zzc0721/torch-performance-test-data (database.md, issues 97, 120, 131, 158 to 162, 185)"
_OF_THE_BEST = 0.93
# GeForce cards reach 0.97 to 1.11 of their sheets (RTX 2080, 3060, 3080 Ti, 4060, 4060 Ti, 4070 SUPER).
_GEFORCE_SHARE = 0.9
A4000_SHARE = 57.7 / 76.7 * _OF_THE_BEST
A40_SHARE = 115.2 / 149.7 * _OF_THE_BEST
# An A40's chip at the same power, whose sheet is of a higher clock; half as large or two thirds at as much power a core.
A6000_SHARE = 115.2 / 154.8 * _OF_THE_BEST
T4_SHARE = 41.9 / 65 * _OF_THE_BEST
L4_SHARE = 55.7 / 121 * _OF_THE_BEST
H20_SHARE = 141.8 / 148 * _OF_THE_BEST
RTX_PRO_6000_SHARE = 365 / 503.8 * _OF_THE_BEST


@dataclass(frozen=True, slots=True)
class _Generation:
    """What tensor cores do over float32: of 16 bits, TF32, 8 bits and 4; None of what they do not take. `share`: of products."""

    wide: float
    tf32: float | None
    narrow: float | None
    source: str
    share: float | None
    narrowest: float | None = None


_TURING = _Generation(4, None, None, TURING, _GEFORCE_SHARE)
_TURING_QUADRO = _Generation(8, None, None, TURING, None)
_AMPERE = _Generation(2, 1, None, GEFORCE, _GEFORCE_SHARE)
_ADA = _Generation(2, 1, 4, GEFORCE, _GEFORCE_SHARE)
_BLACKWELL = _Generation(2, 1, 4, GEFORCE, _GEFORCE_SHARE, narrowest=16)
_AMPERE_RTX = _Generation(4, 2, None, WORKSTATION, A6000_SHARE)
_AMPERE_SMALL = _Generation(4, 2, None, WORKSTATION, A4000_SHARE)
_ADA_RTX = _Generation(4, 2, 8, WORKSTATION, None)


def _card(
    name: str,
    generation: _Generation,
    *,
    memory_gb: int,
    bandwidth_gb_s: float,
    float32_tflops: float,
    power_w: float | None = None,
    is_usual: bool = True,
    also: tuple[str, ...] = (),
) -> CatalogueEntry:
    """`is_usual`: its name without the memory means it, as `also` do."""
    plain = name.lower().replace("-", " ")
    float32 = float32_tflops * 1e12
    rates = {"float16": generation.wide * float32, "float32": float32}
    if generation.tf32 is not None:
        rates |= {"bfloat16": generation.wide * float32, "tf32": generation.tf32 * float32}
    if generation.narrow is not None:
        rates["float8_e4m3fn"] = generation.narrow * float32
    if generation.narrowest is not None:
        rates["float4_e2m1fn"] = generation.narrowest * float32
    sources = one_page(generation.source)
    return CatalogueEntry(
        name=f"{name}-{memory_gb}GB",
        aliases=(plain if is_usual else f"{plain} {memory_gb} gb", *also),
        memory_bytes=memory_gb * 10**9,
        memory_bandwidth_bytes_per_s=bandwidth_gb_s * 1e9,
        peak_flops_per_s=rates,
        power_w=power_w,
        sources=sources if generation.share is None else sources | {"matmul": TORCH_PRODUCTS},
        matmul_share=generation.share,
    )


DESKTOP_CARDS: tuple[CatalogueEntry, ...] = (
    _card("RTX-2070", _TURING, memory_gb=8, bandwidth_gb_s=448, float32_tflops=7.46, power_w=175),
    _card("RTX-2080", _TURING, memory_gb=8, bandwidth_gb_s=448, float32_tflops=10.07, power_w=215),
    _card("Quadro-RTX-6000", _TURING_QUADRO, memory_gb=24, bandwidth_gb_s=672, float32_tflops=16.3),
    _card("Quadro-RTX-8000", _TURING_QUADRO, memory_gb=48, bandwidth_gb_s=672, float32_tflops=16.3, also=("rtx 8000",)),
    _card("RTX-3060", _AMPERE, memory_gb=12, bandwidth_gb_s=360, float32_tflops=12.74, power_w=170),
    _card("RTX-3060-Ti", _AMPERE, memory_gb=8, bandwidth_gb_s=448, float32_tflops=16.2, power_w=200),
    _card("RTX-3070", _AMPERE, memory_gb=8, bandwidth_gb_s=448, float32_tflops=20.31, power_w=220),
    _card("RTX-3070-Ti", _AMPERE, memory_gb=8, bandwidth_gb_s=608, float32_tflops=21.75, power_w=290),
    _card("RTX-3080", _AMPERE, memory_gb=10, bandwidth_gb_s=760, float32_tflops=29.77, power_w=320),
    _card("RTX-3080-Ti", _AMPERE, memory_gb=12, bandwidth_gb_s=912, float32_tflops=34.1, power_w=350),
    _card("RTX-3090-Ti", _AMPERE, memory_gb=24, bandwidth_gb_s=1008, float32_tflops=40.0, power_w=450),
    _card("RTX-4060", _ADA, memory_gb=8, bandwidth_gb_s=272, float32_tflops=15.11, power_w=115),
    _card("RTX-4060-Ti", _ADA, memory_gb=8, bandwidth_gb_s=288, float32_tflops=22.06, power_w=160),
    _card("RTX-4060-Ti", _ADA, memory_gb=16, bandwidth_gb_s=288, float32_tflops=22.06, power_w=165, is_usual=False),
    _card("RTX-4070", _ADA, memory_gb=12, bandwidth_gb_s=504, float32_tflops=29.15, power_w=200),
    _card("RTX-4070-SUPER", _ADA, memory_gb=12, bandwidth_gb_s=504, float32_tflops=35.48, power_w=220),
    _card("RTX-4070-Ti", _ADA, memory_gb=12, bandwidth_gb_s=504, float32_tflops=40.09, power_w=285),
    _card("RTX-4070-Ti-SUPER", _ADA, memory_gb=16, bandwidth_gb_s=672, float32_tflops=44.1, power_w=285),
    _card("RTX-4080", _ADA, memory_gb=16, bandwidth_gb_s=716.8, float32_tflops=48.74, power_w=320),
    _card("RTX-4080-SUPER", _ADA, memory_gb=16, bandwidth_gb_s=736, float32_tflops=52.22, power_w=320),
    _card("RTX-4090-D", _ADA, memory_gb=24, bandwidth_gb_s=1008, float32_tflops=73.54, power_w=425, also=("rtx 4090d", "rtx4090d", "4090d")),
    _card("RTX-5060-Ti", _BLACKWELL, memory_gb=16, bandwidth_gb_s=448, float32_tflops=23.7, power_w=180),
    _card("RTX-5070", _BLACKWELL, memory_gb=12, bandwidth_gb_s=672, float32_tflops=30.87, power_w=250),
    _card("RTX-5070-Ti", _BLACKWELL, memory_gb=16, bandwidth_gb_s=896, float32_tflops=43.94, power_w=300),
    _card("RTX-5080", _BLACKWELL, memory_gb=16, bandwidth_gb_s=960, float32_tflops=56.3, power_w=360),
    _card("RTX-A2000", _AMPERE_SMALL, memory_gb=12, bandwidth_gb_s=288, float32_tflops=8.0, power_w=70, also=("a2000",)),
    _card("RTX-A4000", _AMPERE_SMALL, memory_gb=16, bandwidth_gb_s=448, float32_tflops=19.17, power_w=140, also=("a4000",)),
    _card("RTX-A4500", _AMPERE_RTX, memory_gb=20, bandwidth_gb_s=640, float32_tflops=23.65, power_w=200, also=("a4500",)),
    _card("RTX-A5000", _AMPERE_RTX, memory_gb=24, bandwidth_gb_s=768, float32_tflops=27.77, power_w=230, also=("a5000",)),
    _card("RTX-A5500", _AMPERE_RTX, memory_gb=24, bandwidth_gb_s=768, float32_tflops=34.1, power_w=230, also=("a5500",)),
    _card("RTX-2000-Ada", _ADA_RTX, memory_gb=16, bandwidth_gb_s=224, float32_tflops=12.0, power_w=70),
    _card("RTX-4000-Ada", _ADA_RTX, memory_gb=20, bandwidth_gb_s=360, float32_tflops=26.73, power_w=130),
    _card("RTX-4500-Ada", _ADA_RTX, memory_gb=24, bandwidth_gb_s=432, float32_tflops=39.6, power_w=210),
    _card("RTX-5000-Ada", _ADA_RTX, memory_gb=32, bandwidth_gb_s=576, float32_tflops=65.28, power_w=250),
)  # fmt: skip
