"""The parameters of ResNet-50: 161 leaves, 25.56M numbers."""

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, blocks
_EXPANSION = 4


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes in the order of the layers: convolutions, two vectors of each BatchNorm, the head.

    Source:
        He et al., "Deep residual learning for image recognition", 2015, table 1.
    """
    shapes: list[tuple[int, ...]] = []

    def convolution(size: int, fan_in: int, fan_out: int) -> None:
        shapes.extend([(size, size, fan_in, fan_out), (fan_out,), (fan_out,)])

    convolution(7, 3, 64)
    channels = 64
    for width, blocks in _STAGES:
        for block in range(blocks):
            convolution(1, channels, width)
            convolution(3, width, width)
            convolution(1, width, _EXPANSION * width)
            if block == 0:
                convolution(1, channels, _EXPANSION * width)
            channels = _EXPANSION * width
    return [*shapes, (channels, 1000), (1000,)]
