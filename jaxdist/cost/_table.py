"""The links that are known, each with its source.

Published figures of both directions together are halved: `bytes_per_second` is what leaves a
device. A device of JAX is one core on TPU v2, v3 and 7x, so the figures of a chip are halved there
too. Latencies are published for few links; the source says where one is assumed.
"""

from jaxdist.cost._link import Link, Medium

_TPU_DOCS = "https://docs.cloud.google.com/tpu/docs"
_CACM = "Jouppi et al., A domain-specific supercomputer, https://doi.org/10.1145/3360307"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus"
_NVLINK = "https://www.nvidia.com/en-us/data-center/nvlink"
_NCCL = "latency of a step in NCCL's model, https://github.com/NVIDIA/nccl src/graph/tuning.cc"

# One hop over ICI.
_ICI_ALPHA = 1e-6
_ICI = "; about 1 us for each hop, https://jax-ml.github.io/scaling-book/sharding"
# No figure is published; a round trip between machines of one datacenter.
_DCN_ALPHA = 50e-6
_DCN = "; 50 us for a message is assumed"

_NVLINK_ALPHA, _PCIE_ALPHA, _NET_ALPHA = 3.4e-6, 5.7e-6, 9.6e-6


def _ici(generation: str, sends: float, memory: float, source: str) -> Link:
    return Link(f"tpu-{generation}-ici", _ICI_ALPHA, sends, memory, source + _ICI)


def _dcn(generation: str, sends: float, memory: float, source: str) -> Link:
    return Link(f"tpu-{generation}-dcn", _DCN_ALPHA, sends, memory, source + _DCN)


_ROWS = (
    # CPU. Alpha is what one more device adds for each of them: 400 operands of 1 KiB take 4.7,
    # 22.3 and 76.3 ms on 2, 4 and 8 devices, which is 3 us x devices x devices an operand.
    Link(
        "cpu-threads",
        3e-6,
        5.8e9,
        13.3e9,
        "PERF §3: measured, 400 x 1 KiB and 4 x 16 MiB on 2, 4 and 8 devices of 2 cores",
        Medium.MEMORY,
        scatter_gather=1.4,
    ),
    Link(
        "cpu-processes",
        67e-6,
        1.6e9,
        13.3e9,
        "PERF §6: measured, gloo over loopback, 4 KiB to 64 MiB, 2 processes of 1 and 2 devices",
        Medium.HOST,
        scatter_gather=1.6,
    ),
    # TPU, inside a slice: per device, one direction, all its links.
    _ici("v2", 124e9, 350e9, f"4 x 496 Gbit/s a chip, {_CACM}"),
    _ici("v3", 164e9, 450e9, f"4 x 656 Gbit/s a chip, {_CACM}"),
    _ici("v4", 270e9, 1200e9, f"6 x 45 GB/s a chip, {_BOOK}; memory {_TPU_DOCS}/v4"),
    _ici("v5e", 200e9, 819e9, f"400 GB/s a chip in both directions, {_TPU_DOCS}/v5e"),
    _ici("v5p", 600e9, 2765e9, f"1200 GB/s a chip in both directions, {_TPU_DOCS}/v5p"),
    _ici("v6e", 400e9, 1638e9, f"800 GB/s a chip in both directions, {_TPU_DOCS}/tpu7x"),
    _ici("7x", 300e9, 3690e9, f"1200 GB/s a chip in both directions, {_TPU_DOCS}/tpu7x"),
    # TPU, between slices.
    _dcn("v2", 1.56e9, 350e9, "assumed: one 100 Gbit/s card for 8 cores"),
    _dcn("v3", 1.56e9, 450e9, "assumed: one 100 Gbit/s card for 8 cores"),
    _dcn("v4", 6.25e9, 1200e9, f"50 Gbit/s a chip, {_BOOK}"),
    _dcn("v5e", 3.125e9, 819e9, f"25 Gbit/s a chip: 6.4 Tbit/s for 256, {_TPU_DOCS}/v5e"),
    _dcn("v5p", 6.25e9, 2765e9, f"50 Gbit/s a chip, {_TPU_DOCS}/v5p"),
    _dcn("v6e", 12.5e9, 1638e9, f"100 Gbit/s a chip, {_TPU_DOCS}/tpu7x"),
    _dcn("7x", 6.25e9, 3690e9, f"100 Gbit/s a chip, {_TPU_DOCS}/tpu7x"),
    # GPU, inside a machine.
    Link("nvlink-1", _NVLINK_ALPHA, 80e9, 732e9, f"160 GB/s (P100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-2", _NVLINK_ALPHA, 150e9, 900e9, f"300 GB/s (V100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-3", _NVLINK_ALPHA, 300e9, 1555e9, f"600 GB/s (A100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-4", _NVLINK_ALPHA, 450e9, 3350e9, f"900 GB/s (H100), {_NVLINK}; {_NCCL}"),
    Link("nvlink-5", _NVLINK_ALPHA, 900e9, 8000e9, f"1800 GB/s (B200), {_NVLINK}; {_NCCL}"),
    Link("pcie-3", _PCIE_ALPHA, 15.8e9, 320e9, f"x16, 8 GT/s a lane (PCI-SIG); {_NCCL}"),
    Link("pcie-4", _PCIE_ALPHA, 31.5e9, 600e9, f"x16, 16 GT/s a lane (PCI-SIG); {_NCCL}"),
    Link("pcie-5", _PCIE_ALPHA, 63e9, 2000e9, f"x16, 32 GT/s a lane (PCI-SIG); {_NCCL}"),
    # Between machines: one port for each device.
    Link("ethernet-10", _DCN_ALPHA, 1.25e9, 13.3e9, f"10 Gbit/s (IEEE 802.3){_DCN}"),
    Link("ethernet-25", _DCN_ALPHA, 3.125e9, 320e9, f"25 Gbit/s (IEEE 802.3){_DCN}"),
    Link("ethernet-100", _DCN_ALPHA, 12.5e9, 600e9, f"100 Gbit/s (IEEE 802.3){_DCN}"),
    Link("infiniband-edr", _NET_ALPHA, 12.5e9, 900e9, f"100 Gbit/s (IBTA); {_NCCL}"),
    Link("infiniband-hdr", _NET_ALPHA, 25e9, 1555e9, f"200 Gbit/s (IBTA); {_NCCL}"),
    Link("infiniband-ndr", _NET_ALPHA, 50e9, 3350e9, f"400 Gbit/s (IBTA); {_NCCL}"),
    Link("infiniband-xdr", _NET_ALPHA, 100e9, 8000e9, f"800 Gbit/s (IBTA); {_NCCL}"),
)

TABLE: dict[str, Link] = {row.name: row for row in _ROWS}
