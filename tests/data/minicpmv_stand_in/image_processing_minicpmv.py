"""Stand-in for the code of a MiniCPM-V 4.x checkpoint: pictures into slices of patches."""

import math

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class MiniCPMVBatchFeature(BatchFeature):
    """Lists a row, whose tensors differ in shape, stay lists."""

    def convert_to_tensors(self, tensor_type=None, **_):
        def convert(value):
            if isinstance(value, list):
                return [convert(part) for part in value]
            return value if torch.is_tensor(value) else torch.as_tensor(np.asarray(value))

        if tensor_type is not None:
            self.update({name: convert(value) for name, value in self.items()})
        return self


class MiniCPMVImageProcessor(BaseImageProcessor):
    """A picture is the whole, scaled to `scale_resolution` squared pixels, and slices of it if it
    is larger. A slice of h x w patches is [3, patch, h * w * patch]."""

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        max_slice_nums=4,
        scale_resolution=56,
        patch_size=14,
        image_feature_size=4,
        use_image_id=True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.max_slice_nums, self.scale_resolution = max_slice_nums, scale_resolution
        self.patch_size, self.image_feature_size = patch_size, image_feature_size
        self.use_image_id, self.version = use_image_id, 4.5

    def grid(self, size):
        """(columns, rows) of the slices of a picture of `size` (width, height); None: not sliced"""
        count = min(math.ceil(size[0] * size[1] / self.scale_resolution**2), self.max_slice_nums)
        if count < 2:
            return None
        shapes = [(n, count // n) for n in range(1, count + 1) if count % n == 0]
        return min(shapes, key=lambda s: abs(math.log(size[0] / size[1] * s[1] / s[0])))

    def placeholder(self, size, index):
        """What stands in the text for picture `index` of a row."""
        features = "<unk>" * self.image_feature_size
        text = f"<image_id>{index}</image_id>" if self.use_image_id else ""
        text += f"<image>{features}</image>"
        columns, rows = self.grid(size) or (0, 0)
        return text + "\n".join([f"<slice>{features}</slice>" * columns] * rows)

    def patches(self, image):
        """The picture as a row of patches, and its (height, width) in patches."""
        side, patch = self.scale_resolution, self.patch_size
        ratio = image.width / image.height
        wide = max(patch, round(side * math.sqrt(ratio) / patch) * patch)
        high = max(patch, round(side / math.sqrt(ratio) / patch) * patch)
        pixels = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC), np.float32)
        pixels = pixels.transpose(2, 0, 1) / 127.5 - 1
        rows = pixels.reshape(3, high // patch, patch, wide)
        return rows.transpose(0, 2, 1, 3).reshape(3, patch, -1), [high // patch, wide // patch]

    def slices(self, image):
        columns, rows = self.grid(image.size) or (0, 0)
        wide, high = (image.width // columns, image.height // rows) if columns else (0, 0)
        boxes = [(x * wide, y * high) for y in range(rows) for x in range(columns)]
        return [image, *(image.crop((x, y, x + wide, y + high)) for x, y in boxes)]

    def preprocess(self, images, return_tensors=None, **_):
        """`images`: a list a row. All that is returned is a list a row too."""
        out = {"pixel_values": [], "image_sizes": [], "tgt_sizes": [], "temporal_ids": []}
        for row in images:
            made = [
                self.patches(part.convert("RGB")) for image in row for part in self.slices(image)
            ]
            out["pixel_values"].append([pixels for pixels, _ in made])
            out["image_sizes"].append([image.size for image in row])
            out["tgt_sizes"].append(np.array([size for _, size in made]) if made else [])
            out["temporal_ids"].append([[-1]] * len(made))
        return MiniCPMVBatchFeature(out, tensor_type=return_tensors)


AutoImageProcessor.register("MiniCPMVImageProcessor", MiniCPMVImageProcessor)
