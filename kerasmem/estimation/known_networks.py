"""Networks that people know, with what the formula needs of them; written by scripts/known_networks.py.

Images of 224 × 224 × 3, 1000 classes; AlexNet as one tower, GoogLeNet without its auxiliary outputs.
"""

from __future__ import annotations

# name, parameters, activation elements for one sample
NETWORKS: tuple[tuple[str, int, int], ...] = (
    ("AlexNet", 62_378_344, 942_920),
    ("GoogLeNet", 6_998_552, 6_031_768),
    ("VGG-16", 138_357_544, 15_237_608),
    ("VGG-19", 143_667_240, 16_542_184),
    ("Inception v3", 23_851_784, 16_735_608),
    ("ResNet-50", 25_636_712, 37_120_212),
    ("ResNet-152", 60_419_944, 79_067_348),
    ("MobileNet", 4_253_864, 16_845_200),
    ("MobileNetV2", 3_538_984, 21_815_960),
    ("DenseNet-121", 8_062_504, 49_926_612),
    ("Xception", 22_910_480, 34_572_168),
    ("EfficientNet-B0", 5_330_571, 24_896_743),
    ("EfficientNet-B7", 66_658_687, 141_268_475),
    ("ConvNeXt-T", 28_589_128, 31_726_312),
)
