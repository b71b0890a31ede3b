"""Backbones of keras-hub from small configurations, with what they are fine-tuned with; nothing is downloaded.

keras-hub is no requirement of kerasmem: `pip install keras-hub` into an environment of your own to run these. Without
tensorflow-text its tokenizers are missing, which models do not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_hub

layers, hub = keras.layers, keras_hub.models
WORDS, LENGTH, SIDE = 2000, 48, 64


def _of_fixed_length(backbone: Any, length: int = LENGTH) -> tuple[Any, Any]:
    """Return inputs like a backbone's without open dimensions, and what the backbone makes of them."""

    def fixed(tensor: Any) -> Any:
        name = tensor.name if keras.tree.is_nested(backbone.input) else None
        return keras.Input([size or length for size in tensor.shape[1:]], dtype=tensor.dtype, name=name)

    inputs = keras.tree.map_structure(fixed, backbone.input)
    return inputs, backbone(inputs)


def language(backbone: Any, part: str | None = None) -> Any:
    """A language model: the next token by the backbone's own embedding, turned around."""
    inputs, found = _of_fixed_length(backbone)
    logits = backbone.token_embedding(found if part is None else found[part], reverse=True)
    model = keras.Model(inputs, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["sparse_categorical_accuracy"])
    return model


def classifier(backbone: Any, part: str | None = None) -> Any:
    """A classifier of ten classes on what the backbone puts out, averaged over places where it has any."""
    inputs, found = _of_fixed_length(backbone)
    x = found if part is None else found[part]
    if len(x.shape) > 2:
        x = keras.ops.mean(x, axis=tuple(range(1, len(x.shape) - 1)))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.Dropout(0.1)(x)))
    model.compile(keras.optimizers.AdamW(5e-5), "sparse_categorical_crossentropy")
    return model


def alone(backbone: Any) -> Any:
    """The backbone itself, each output against targets of its shape."""
    inputs, found = _of_fixed_length(backbone)
    model = keras.Model(inputs, found)
    model.compile("adam", "mse")
    return model


_TEXT: dict[str, Any] = {
    "vocabulary_size": WORDS, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "intermediate_dim": 128
}  # fmt: skip
_GROUPED: dict[str, Any] = {
    "vocabulary_size": WORDS, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 64,
    "intermediate_dim": 128,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "image_shape": (SIDE, SIDE, 3), "num_layers": 2, "num_heads": 4, "hidden_dim": 64
}  # fmt: skip
_IMAGE: dict[str, Any] = {"image_shape": (SIDE, SIDE, 3)}


def _resnet(**options: Any) -> Any:
    settings: dict[str, Any] = {
        "input_conv_filters": [64], "input_conv_kernel_sizes": [7], "stackwise_num_filters": [64, 64, 128, 256],
        "stackwise_num_blocks": [1, 1, 1, 1], "stackwise_num_strides": [1, 2, 2, 2], "block_type": "bottleneck_block",
    }  # fmt: skip
    return hub.ResNetBackbone(**{**settings, **_IMAGE, **options})


def _mobilenet() -> Any:
    return hub.MobileNetBackbone(
        stackwise_expansion=[[32, 48], [96, 96]], stackwise_num_blocks=[2, 2],
        stackwise_num_filters=[[16, 16], [32, 32]], stackwise_kernel_size=[[3, 3], [5, 5]],
        stackwise_num_strides=[[2, 1], [2, 1]], stackwise_se_ratio=[[None, None], [0.25, 0.25]],
        stackwise_activation=[["relu", "relu"], ["hard_swish", "hard_swish"]],
        stackwise_padding=[[1, 1], [2, 2]], output_num_filters=128, depthwise_filters=8,
        depthwise_stride=2, depthwise_residual=False, last_layer_filter=128, **_IMAGE,
    )  # fmt: skip


def _efficientnet() -> Any:
    return hub.EfficientNetBackbone(
        stackwise_width_coefficients=[1.0] * 4, stackwise_depth_coefficients=[1.0] * 4,
        stackwise_kernel_sizes=[3, 3, 5, 3], stackwise_num_repeats=[1, 2, 2, 2],
        stackwise_input_filters=[16, 16, 24, 40], stackwise_output_filters=[16, 24, 40, 80],
        stackwise_expansion_ratios=[1, 4, 4, 6], stackwise_squeeze_and_excite_ratios=[0.0, 0.0, 0.25, 0.25],
        stackwise_strides=[1, 2, 2, 2], stackwise_block_types=["fused", "fused", "unfused", "unfused"],
        stackwise_force_input_filters=[0] * 4, stackwise_nores_option=[False] * 4, num_features=320,
        input_shape=(SIDE, SIDE, 3),
    )  # fmt: skip


def _hgnet() -> Any:
    return hub.HGNetV2Backbone(
        depths=[1, 1, 2], embedding_size=16, hidden_sizes=[32, 64, 128], stem_channels=[3, 16, 16], hidden_act="relu",
        use_learnable_affine_block=True, apply_downsample=[False, True, True],
        stackwise_stage_filters=[(16, 16, 32, 1, 2, 3), (32, 16, 64, 1, 2, 3), (64, 32, 128, 2, 2, 5)],
        use_lightweight_conv_block=[False, False, True], **_IMAGE,
    )  # fmt: skip


def _mit() -> Any:
    return hub.MiTBackbone(
        layerwise_depths=[1, 1, 1, 1], num_layers=4, layerwise_num_heads=[1, 2, 4, 8],
        layerwise_sr_ratios=[8, 4, 2, 1], max_drop_path_rate=0.1, layerwise_patch_sizes=[7, 3, 3, 3],
        layerwise_strides=[4, 2, 2, 2], hidden_dims=[16, 32, 64, 128], **_IMAGE,
    )  # fmt: skip


def _dino() -> Any:
    return hub.DINOV2Backbone(patch_size=8, intermediate_dim=128, position_embedding_shape=(SIDE, SIDE), **_VIT)


def _encoders(family: str) -> dict[str, Any]:
    sizes = {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "intermediate_dim": 128}
    of_images = getattr(hub, f"{family}VisionEncoder")(patch_size=8, **_IMAGE, **sizes)
    of_texts = getattr(hub, f"{family}TextEncoder")(
        vocabulary_size=WORDS, embedding_dim=64, max_sequence_length=LENGTH, **sizes
    )
    return {"vision_encoder": of_images, "text_encoder": of_texts}


def _smol() -> Any:
    return hub.SmolLM3Backbone(
        vocabulary_size=WORDS, hidden_dim=64, intermediate_dim=128, num_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=False, attention_dropout=0.0, rope_layer_enabled_list=[True, False],
        layer_types=["attention"] * 2, mlp_bias=False, layer_norm_epsilon=1e-5, max_position_embeddings=LENGTH,
        rope_theta=1e4, partial_rotary_factor=1.0,
    )  # fmt: skip


_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts": 4, "top_k": 2}
# name -> how the model is built
HUB: dict[str, Callable[[], Any]] = {
    "albert": lambda: classifier(hub.AlbertBackbone(embedding_dim=32, **_TEXT), "pooled_output"),
    "bert": lambda: classifier(hub.BertBackbone(**_TEXT), "pooled_output"),
    "deberta_v3": lambda: classifier(hub.DebertaV3Backbone(**_TEXT)),
    "distil_bert": lambda: classifier(hub.DistilBertBackbone(**_TEXT)),
    "electra": lambda: classifier(
        hub.ElectraBackbone(WORDS, 2, 4, hidden_dim=64, embedding_dim=32, intermediate_dim=128), "pooled_output"
    ),
    "esm": lambda: classifier(hub.ESMBackbone(**_TEXT)),
    "f_net": lambda: classifier(hub.FNetBackbone(WORDS, 2, hidden_dim=64, intermediate_dim=128), "pooled_output"),
    "roberta": lambda: classifier(hub.RobertaBackbone(**_TEXT)),
    "roformer_v2": lambda: classifier(hub.RoformerV2Backbone(head_size=16, **_TEXT)),
    "xlm_roberta": lambda: classifier(hub.XLMRobertaBackbone(**_TEXT)),
    "xlnet": lambda: classifier(hub.XLNetBackbone(**_TEXT)),
    "bloom": lambda: language(hub.BloomBackbone(**_TEXT)),
    "falcon": lambda: language(
        hub.FalconBackbone(WORDS, 2, num_attention_heads=4, hidden_dim=64, intermediate_dim=128)
    ),
    "gemma": lambda: language(hub.GemmaBackbone(head_dim=16, **_GROUPED)),
    "gemma3": lambda: language(hub.Gemma3Backbone(head_dim=16, image_size=None, sliding_window_size=16, **_GROUPED)),
    "gpt2": lambda: language(hub.GPT2Backbone(**_TEXT)),
    "gpt_neo_x": lambda: language(hub.GPTNeoXBackbone(**_TEXT)),
    "gpt_oss": lambda: language(hub.GptOssBackbone(head_dim=16, **_EXPERTS)),
    "llama": lambda: language(hub.LlamaBackbone(**_GROUPED)),
    "mistral": lambda: language(hub.MistralBackbone(sliding_window=16, **_GROUPED)),
    "mixtral": lambda: language(hub.MixtralBackbone(**_EXPERTS)),
    "opt": lambda: language(hub.OPTBackbone(**_TEXT)),
    "phi3": lambda: language(hub.Phi3Backbone(**_GROUPED)),
    "qwen": lambda: language(hub.QwenBackbone(**_GROUPED)),
    "qwen3": lambda: language(hub.Qwen3Backbone(head_dim=16, **_GROUPED)),
    "qwen_moe": lambda: language(
        hub.QwenMoeBackbone(moe_intermediate_dim=64, shared_expert_intermediate_dim=64, **_EXPERTS)
    ),
    "qwen3_moe": lambda: language(hub.Qwen3MoeBackbone(moe_intermediate_dim=64, head_dim=16, **_EXPERTS)),
    "smollm3": lambda: language(_smol()),
    "rwkv7": lambda: classifier(hub.RWKV7Backbone(64, 16, 2, WORDS, 128)),
    "bart": lambda: language(hub.BartBackbone(**_TEXT), "decoder_sequence_output"),
    "t5": lambda: language(hub.T5Backbone(**_TEXT), "decoder_sequence_output"),
    "whisper": lambda: language(
        hub.WhisperBackbone(max_encoder_sequence_length=96, max_decoder_sequence_length=LENGTH, **_TEXT),
        "decoder_sequence_output",
    ),
    "deit": lambda: classifier(hub.DeiTBackbone(patch_size=8, intermediate_dim=128, **_VIT)),
    "densenet": lambda: classifier(hub.DenseNetBackbone([2, 2, 2], **_IMAGE)),
    "dinov2": lambda: classifier(_dino()),
    "efficientnet": lambda: classifier(_efficientnet()),
    "hgnet_v2": lambda: alone(_hgnet()),
    "mit": lambda: classifier(_mit()),
    "mobilenet": lambda: classifier(_mobilenet()),
    "resnet": lambda: classifier(_resnet()),
    "resnet_v2": lambda: classifier(_resnet(use_pre_activation=True, block_type="basic_block")),
    "swin": lambda: classifier(
        hub.SwinTransformerBackbone(embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4, **_IMAGE)
    ),
    "vgg": lambda: classifier(hub.VGGBackbone([1, 1, 2], [32, 64, 128], **_IMAGE)),
    "vit": lambda: classifier(hub.ViTBackbone(patch_size=8, mlp_dim=128, **_VIT)),
    "vit_det": lambda: classifier(
        hub.ViTDetBackbone(
            hidden_size=64, num_layers=2, intermediate_dim=128, num_heads=4, global_attention_layer_indices=[1],
            patch_size=8, num_output_channels=64, window_size=4, **_IMAGE,
        )
    ),
    "xception": lambda: classifier(
        hub.XceptionBackbone([[32, 64], [64, 128], [128, 128]], [True, True, False], **_IMAGE)
    ),
    "deeplab_v3": lambda: alone(
        hub.DeepLabV3Backbone(
            _resnet(), spatial_pyramid_pooling_key="P5", upsampling_size=8, dilation_rates=[2, 4],
            low_level_feature_key="P2", **_IMAGE,
        )
    ),
    "segformer": lambda: alone(hub.SegFormerBackbone(_mit(), projection_filters=64)),
    "retinanet": lambda: alone(hub.RetinaNetBackbone(_resnet(), min_level=3, max_level=6, use_p5=False, **_IMAGE)),
    "depth_anything": lambda: alone(
        hub.DepthAnythingBackbone(
            hub.DINOV2Backbone(patch_size=8, intermediate_dim=128, position_embedding_shape=(SIDE, SIDE),
                               **{**_VIT, "num_layers": 4}),
            reassemble_factors=[4, 2, 1, 0.5], neck_hidden_dims=[16, 32, 64, 64], fusion_hidden_dim=32,
            head_hidden_dim=16, head_in_index=-1, feature_keys=["stage1", "stage2", "stage3", "stage4"],
        )
    ),
    "clip": lambda: alone(hub.CLIPBackbone(projection_dim=64, **_encoders("CLIP"))),
    "siglip": lambda: alone(hub.SigLIPBackbone(**_encoders("SigLIP"))),
    "pali_gemma": lambda: language(
        hub.PaliGemmaBackbone(
            image_size=SIDE, head_dim=16, vit_patch_size=16, vit_num_heads=4, vit_hidden_dim=64, vit_num_layers=2,
            vit_intermediate_dim=128, **_GROUPED,
        )
    ),
}  # fmt: skip


def backbone(name: str) -> Any:
    """Return a model by its name in `HUB`."""
    return HUB[name]()
