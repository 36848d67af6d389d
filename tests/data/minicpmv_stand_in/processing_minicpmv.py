"""Stand-in for the code of a MiniCPM-V 4.x checkpoint: text and pictures of rows at once."""

import torch
from transformers.processing_utils import ProcessorMixin

from .image_processing_minicpmv import MiniCPMVBatchFeature


class MiniCPMVProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None):
        super().__init__(image_processor, tokenizer)

    def __call__(self, text, images=None, return_tensors="pt", **kwargs):
        """As the published one, it cannot do without a list of pictures, if an empty one, a row."""
        if images is not None:
            made = self.image_processor(images, return_tensors=return_tensors)
        rows, bounds = [], []
        for i, whole in enumerate([text] if isinstance(text, str) else text):
            pieces = whole.split("(<image>./</image>)")
            sizes = [tuple(map(int, size)) for size in made["image_sizes"][i]]
            assert len(pieces) == len(sizes) + 1, "a picture without a place, or the other way"
            full = pieces[0]
            for index, (size, piece) in enumerate(zip(sizes, pieces[1:])):
                full += self.image_processor.placeholder(size, index) + piece
            ids = torch.tensor(self.tokenizer.encode(full, **kwargs), dtype=torch.int32)
            start, end, part, part_end = self.tokenizer.convert_tokens_to_ids(
                ["<image>", "</image>", "<slice>", "</slice>"]
            )
            first = torch.where((ids == start) | (ids == part))[0] + 1
            last = torch.where((ids == end) | (ids == part_end))[0]
            rows.append(ids)
            bounds.append(torch.stack([first, last], dim=1))
        longest = max(map(len, rows))
        ids = torch.zeros((len(rows), longest), dtype=torch.int32)
        for i, row in enumerate(rows):  # on the left, with 0
            ids[i, longest - len(row) :] = row
            bounds[i] = bounds[i] + longest - len(row)
        return MiniCPMVBatchFeature(
            {**made, "input_ids": ids, "attention_mask": ids.ne(0), "image_bound": bounds}
        )
