"""Stand-in for the code of a MiniCPM-V 4.x checkpoint: the model.

The contract of its forward is the published one. Where the published code would compute something
for a batch that does not fit together, this one raises.
"""

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM, Qwen3PreTrainedModel

from .configuration_minicpm import MiniCPMVConfig


class SiglipEncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        wide, high = config.hidden_size, config.intermediate_size
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.self_attn = nn.MultiheadAttention(wide, config.num_attention_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(wide, high), nn.GELU(), nn.Linear(high, wide))

    def forward(self, x, empty):
        y = self.layer_norm1(x)
        x = x + self.self_attn(y, y, y, key_padding_mask=empty, need_weights=False)[0]
        return x + self.mlp(self.layer_norm2(x))


class Tower(nn.Module):
    """Slices as rows of patches [B, 3, patch, L * patch] with their (height, width) in patches."""

    def __init__(self, config):
        super().__init__()
        self.patch, self.side = config.patch_size, config.image_size // config.patch_size
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, self.patch, stride=self.patch)
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)
        self.register_buffer("edges", self.make_edges(), persistent=False)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(SiglipEncoderLayer(config) for _ in layers)
        self.post_layernorm = nn.LayerNorm(config.hidden_size)

    def make_edges(self):
        return torch.arange(1, self.side) / self.side

    def forward(self, pixels, sizes, empty):
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        places = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        for place, (high, wide) in zip(places, sizes.tolist()):
            down, right = (
                torch.bucketize(torch.arange(n, device=x.device) / n, self.edges, right=True)
                for n in (high, wide)
            )
            place[: high * wide] = (down[:, None] * self.side + right).flatten()
        x = x + self.position_embedding(places)
        for layer in self.layers:
            x = layer(x, empty)
        return self.post_layernorm(x)


class Resampler(nn.Module):
    """A few queries look at the patches of a slice, which know their places."""

    def __init__(self, queries, wide, heads, tower_wide):
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, wide) * 0.2)
        self.kv_proj = nn.Linear(tower_wide, wide, bias=False)
        self.attn = nn.MultiheadAttention(wide, heads)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(wide) for _ in range(3))
        self.proj = nn.Parameter(torch.randn(wide, wide) * wide**-0.5)
        self.register_buffer("pos_embed", self.make_places(), persistent=False)

    def make_places(self, most=70):
        """[most, most, wide], by row and column."""
        wide = len(self.proj) // 4
        angles = np.arange(most)[:, None] / 100 ** (np.arange(wide) / wide)
        one = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        both = np.broadcast_arrays(one[None, :], one[:, None])
        return torch.from_numpy(np.concatenate(both, axis=2)).float()

    def forward(self, x, sizes, empty):
        x = self.ln_kv(self.kv_proj(x)).transpose(0, 1)  # [L, B, D]
        places = [self.pos_embed[:high, :wide].flatten(0, 1) for high, wide in sizes.tolist()]
        keys = x + pad_sequence(places).to(x.dtype)
        query = self.ln_q(self.query).unsqueeze(1).repeat(1, x.shape[1], 1)
        out = self.attn(query, keys, x, key_padding_mask=empty)[0].transpose(0, 1)
        return self.ln_post(out) @ self.proj


class MiniCPMV(Qwen3PreTrainedModel):
    config_class = MiniCPMVConfig

    def __init__(self, config):
        super().__init__(config)
        self.llm = Qwen3ForCausalLM(config)
        self.vpm = Tower(config.vision_config)
        wide = config.hidden_size
        self.resampler = Resampler(
            config.query_num, wide, config.num_attention_heads, config.vision_config.hidden_size
        )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Buffers too, which `from_pretrained` of transformers 5 empties."""
        super()._init_weights(module)
        if isinstance(module, Tower):
            module.edges.copy_(module.make_edges())
        if isinstance(module, Resampler):
            module.pos_embed.copy_(module.make_places())

    def get_input_embeddings(self):
        return self.llm.get_input_embeddings()

    def get_output_embeddings(self):
        return self.llm.lm_head

    def get_vllm_embedding(self, data):
        """Token embeddings [B, L, D] with those of slices in their places; the latter, a row."""
        embeddings = self.llm.model.embed_tokens(data["input_ids"])
        rows = data["pixel_values"]
        self.check(data)
        slices = [part for row in rows for part in row]
        if not slices:
            if self.training:
                raise RuntimeError("no picture in training: ranks would not run alike")
            return embeddings, [[] for _ in rows]
        sizes = torch.vstack([s for s in data["tgt_sizes"] if torch.is_tensor(s)])
        features, at_once = [], self.config.vision_batch_size
        for i in range(0, len(slices), at_once):
            features.append(self.see(slices[i : i + at_once], sizes[i : i + at_once]))
        features = torch.cat(features).to(embeddings.dtype).split([len(row) for row in rows])
        for i, (found, bound) in enumerate(zip(features, data["image_bound"])):
            if len(found):
                places = torch.cat([torch.arange(start, end) for start, end in bound])
                places = places.to(embeddings.device)[:, None].expand(-1, embeddings.shape[-1])
                embeddings[i].scatter_(0, places, found.flatten(0, 1))
        return embeddings, list(features)

    def see(self, slices, sizes):
        flat = pad_sequence([s.flatten(0, 1).T for s in slices], batch_first=True)  # [B, L, 3 * p]
        pixels = flat.transpose(1, 2).unflatten(1, (3, -1)).to(self.resampler.proj.dtype)
        count = torch.arange(flat.shape[1] // self.vpm.patch, device=flat.device)
        empty = count >= sizes.prod(dim=1, keepdim=True)
        return self.resampler(self.vpm(pixels, sizes, empty), sizes, empty)

    def check(self, data):
        """What the published code takes on trust. Ids are those of the config."""
        unk, starts, ends = (self.config.token_ids[k] for k in ("unk", "starts", "ends"))
        parts = zip(*(data[k] for k in ("input_ids", "pixel_values", "tgt_sizes", "image_bound")))
        for i, (ids, pixels, sizes, bound) in enumerate(parts):
            if not len(pixels) == len(sizes) == len(bound):
                counts = f"{len(pixels)} pixels, {len(sizes)} sizes, {len(bound)} bounds"
                raise ValueError(f"row {i}: {counts}")
            if int((ids == unk).sum()) != self.config.query_num * len(bound):
                raise ValueError(f"row {i}: tokens of a picture without one")
            for start, end in bound.tolist() if len(bound) else ():
                inside = ids[start:end].tolist() == [unk] * self.config.query_num
                if not inside or int(ids[start - 1]) not in starts or int(ids[end]) not in ends:
                    raise ValueError(f"row {i}: {start} to {end} is no slice")
            for part, (high, wide) in zip(pixels, sizes.tolist() if len(sizes) else ()):
                if part.shape != (3, self.vpm.patch, high * wide * self.vpm.patch):
                    raise ValueError(f"row {i}: {tuple(part.shape)} for {high} x {wide} patches")

    def forward(self, data, **kwargs):
        embeddings, _ = self.get_vllm_embedding(data)
        return self.llm(
            input_ids=None, position_ids=data["position_ids"], inputs_embeds=embeddings, **kwargs
        )

    def generate(self, *args, **kwargs):
        raise NotImplementedError("the published one takes other arguments than transformers'")
