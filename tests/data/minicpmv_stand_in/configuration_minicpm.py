"""Stand-in for the code of a MiniCPM-V 4.x checkpoint: its config."""

from transformers import Qwen3Config, SiglipVisionConfig


class MiniCPMVConfig(Qwen3Config):
    """The fields of the language model, and a few more.

    query_num: tokens that a slice takes. vision_batch_size: slices that the tower takes at once.
    """

    model_type = "minicpmv"

    def __init__(self, query_num=4, vision_batch_size=2, vision_config=None, **kwargs):
        self.query_num, self.vision_batch_size = query_num, vision_batch_size
        if not isinstance(vision_config, SiglipVisionConfig):
            vision_config = SiglipVisionConfig(**(vision_config or {}))
        self.vision_config = vision_config
        super().__init__(**kwargs)
