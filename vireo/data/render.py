"""The only call of a processor: a Conversation becomes an Example, with its label mask.

One private control token, the *mark*, does the work that text search cannot do. It is added to this
module's own copy of the tokenizer, stands in the text that the processor gets, and is taken out of
the ids again:

- round each image slot, so that the ids before and after the processor expanded the images align
  (where a processor leaves one token an image as it is, they align by themselves);
- in place of a control token that a person typed, whose ids as plain text are put back instead;
- where one token would reach from the prompt into the answer, to part them as generation does.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image as Pil
from tokenizers import AddedToken

from vireo.data import chat_templates
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.images import ImageError, as_row_error, fit_image, load_image, resized
from vireo.data.model_folder import load_config, load_processor
from vireo.data.nested import flatten
from vireo.data.patches import Patches
from vireo.data.positions import Positions
from vireo.data.prompt import Prompt
from vireo.data.ragged import BASE_KEYS, IGNORE, Example
from vireo.data.template import ChatTemplate, check_others, control_tokens
from vireo.data.typed import MARK, Typed
from vireo.errors import InputError, RowError
from vireo.hub import local_folder


@dataclass
class _Encoded:
    """An example, and its text and ids as they are before the processor expands the images."""

    example: Example
    text: str
    ids: list[int]


class Renderer:
    """Turns conversations into examples for one model; picklable, used in loader workers.

    `max_length`: most tokens of a row after image expansion (None: the model's limit).
    `budget`: most tokens of a packed micro-batch, which no row may pass either.
    """

    def __init__(
        self,
        model_path: str,
        processor_path: str | None = None,
        *,
        chat_template: str | None = None,
        image_size: int | None = None,
        image_strategy: str = "longest",
        max_length: int | None = None,
        budget: int | None = None,
        many_images: bool = True,
        trust_remote_code: bool = False,
    ):
        self.model_path, self.processor_path = model_path, processor_path or model_path
        self.config, self.family = load_config(model_path, trust_remote_code)
        self.image_size, self.image_strategy = image_size, image_strategy
        self.many_images = many_images
        self.max_length = self._limit(max_length)
        self.longest = min(self.max_length, budget or self.max_length)
        self.processor = load_processor(self.family, self.processor_path, trust_remote_code)
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        template = getattr(self.processor, "chat_template", None) or tokenizer.chat_template
        if chat_template is not None:
            template = chat_templates.source(
                chat_template, self.family.placeholder or "", tokenizer
            )
        if not isinstance(template, str):
            raise InputError(f"{self.processor_path}: no chat template beside the tokenizer")
        self.tokenizer = tokenizer
        written = self.family.written
        self.template = ChatTemplate(
            template, tokenizer, parts=self.family.has_vision and not written, image=written
        )
        self.controls = control_tokens(tokenizer)
        self._words = set(tokenizer.get_vocab().values())
        tokenizer.add_tokens(
            [AddedToken(MARK, special=True, normalized=False)], special_tokens=True
        )
        self.mark_id = tokenizer.convert_tokens_to_ids(MARK)
        # Texts that are rendered already have control tokens that mean it, but never an image's.
        self._reserved = self.family.image_tokens if chat_template == "none" else ()
        self._typed = Typed.pattern(() if chat_template == "none" else self.controls)
        self.keys = {**BASE_KEYS, **self.family.keys}
        vocabulary = tokenizer.get_vocab()  # in some checkpoints of a family, some are plain text
        self.image_ids = {vocabulary[t] for t in self.family.image_tokens if t in vocabulary}
        self.pad_id = tokenizer.pad_token_id
        if self.pad_id is None:
            self.pad_id = tokenizer.eos_token_id
        self.positions = Positions(self.config, self.family)
        self._take_around()
        self._check_processor()
        self.patches = self._own_patches()

    def example(self, row: Conversation) -> Example:
        """A training example: the assistant's text and end-of-turn tokens carry loss.

        Raises RowError (naming the row) for images that cannot be read, a template that cannot
        render the row, a row over the length limit, or one with nothing to supervise.
        """
        try:
            example = self._encode(row, row.turns, prompt=False).example
            if example.supervised == 0:
                raise RowError("no_assistant", "no token of the row carries loss")
            return example
        except RowError as error:
            raise error.at(row.where) from error

    def prompt(self, row: Conversation) -> tuple[Example, str]:
        """The row up to its last answer, opened for generation, and that answer's text."""
        try:
            answers = [i for i, turn in enumerate(row.turns) if turn.role == "assistant"]
            if not answers:
                raise RowError("no_assistant", "the row has no answer to open a prompt for")
            last = answers[-1]
            if last == 0:
                raise RowError("turn_order", "the row's only answer has nothing before it")
            return self._encode(row, row.turns[:last], prompt=True).example, row.turns[last].text
        except RowError as error:
            raise error.at(row.where) from error

    def rollout(self, row: Conversation) -> Prompt:
        """The row, less an answer that ends it, opened for generation: both sides' view of it.

        RowError: as `example`, or the prompt leaves no room for an answer.
        """
        turns, answer = row.turns, None
        if turns[-1].role == "assistant" and len(turns) > 1:
            turns, answer = turns[:-1], turns[-1].text
        try:
            shown = sum(isinstance(part, Image) for turn in turns for part in turn.parts)
            pictures = [self._sized(p) for p in self.pictures(row, shown)]
            made = self._encode(row, turns, prompt=True, pictures=pictures)
        except RowError as error:
            raise error.at(row.where) from error
        return Prompt(made.example, made.ids, made.text, pictures, answer, row)

    def dummy(self) -> dict[str, torch.Tensor]:
        """The processor's tensors of one smallest image, for ranks that have none to show."""
        from PIL import Image as Pil

        turn = Turn("user", (Text("."),))
        blank = Pil.new("RGB", (8, 8), "white")
        text = self.template.render([turn], prompt=True) + (self.family.placeholder or "")
        out = self.call(text, [blank])
        if self.family.remote:  # which takes whole rows
            return out
        return {
            n: out[n] for n, key in self.family.keys.items() if key.kind != "token" and n in out
        }

    def empty(self, tokens: int = 2) -> Example:
        """Tokens of which one carries loss: what a rank runs when it has nothing left."""
        ids = torch.full((tokens,), self.pad_id)
        labels = torch.tensor([IGNORE] * (tokens - 1) + [self.pad_id])
        fields = {"input_ids": ids, "labels": labels, "loss_weight": (labels != IGNORE).float()}
        return Example(fields | {"positions": self.positions(fields)}, self.keys)

    def empty_with_image(self) -> Example:
        """A shortest row with a blank image: the same, for micro-batches of image rows."""
        from PIL import Image as Pil

        turns = (Turn("user", (Image(0), Text("."))), Turn("assistant", (Text("."),)))
        blank = Pil.new("RGB", (8, 8), "white")
        return self.example(Conversation(turns, (ImageRef(blank),)))

    def pictures(self, row: Conversation, count: int | None = None) -> list[Any]:
        """The row's decoded images as the processor gets them (RGB, fitted by the settings)."""
        mean = getattr(getattr(self.processor, "image_processor", None), "image_mean", None)
        colour = tuple(round(255 * c) for c in mean) if mean else (127, 127, 127)
        refs = row.images if count is None else row.images[:count]
        try:
            loaded = [load_image(ref) for ref in refs]
        except ImageError as error:
            raise as_row_error(error) from error
        return [fit_image(i, self.image_strategy, self.image_size, colour) for i in loaded]

    def _sized(self, picture: Any) -> Any:
        """The picture at the size that the processor would give it, by the processor's own resize:
        its resize then has nothing to do, here and in an engine."""
        if self.family.grid is None:
            return picture
        inner = self.processor.image_processor
        try:
            _, rows, columns = inner([picture], return_tensors="pt")[self.family.grid][0].tolist()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise _refused([picture], error) from error
        size = (columns * inner.patch_size, rows * inner.patch_size)
        return picture if picture.size == size else resized(picture, size, inner)

    @cached_property
    def _splitting(self) -> Any:
        """A tokenizer of its own for control tokens as text: a call for these switches the whole
        tokenizer over, under the hands of other threads that render at the time."""
        return copy.deepcopy(self.tokenizer)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        stops = {self.tokenizer.eos_token_id, self.pad_id}
        if self.template.end_of_turn is not None:
            stops.add(self.tokenizer.convert_tokens_to_ids(self.template.end_of_turn))
        return tuple(sorted(stops - {None}))

    @cached_property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that no answer may have: those of images, which only a processor writes, and rows
        of the output head that stand for no token."""
        rows = range(self.config.get_text_config().vocab_size)
        return tuple(i for i in rows if i in self.image_ids or i not in self._words)

    def _check_processor(self) -> None:
        """Raises InputError where the processor adds to a text, as some put a start before it."""
        text = self.template.render([Turn("user", (Text("."),))], prompt=True)
        short, full = self._tokenize(text)["input_ids"], self.call(text, [])["input_ids"][0]
        if short != full.tolist():
            raise InputError(
                f"the processor reads {text[:40]!r} as {self.tokenizer.decode(full)[:40]!r}: the "
                "model's chat template must write what the processor would add"
            )

    def _own_patches(self) -> Patches | None:
        """A shorter way to what the processor makes of a row, where it was found to lead there: all
        of two pictures is compared, bit for bit. None: the processor itself is asked."""
        if self.family.grid is None:
            return None
        slot = f"{MARK}{self.family.placeholder}{MARK}"
        text, pictures = f"a{slot}b{slot}.", [_ramp(61, 90), _ramp(112, 56)]
        try:
            patches = Patches(self.processor.image_processor)
            mine = self._expanded(patches, self._tokenize(text)["input_ids"], pictures)
            theirs = {n: v for n, v in self.call(text, pictures).items() if n in self.keys}
        except (ArithmeticError, AttributeError, LookupError, RowError, TypeError, ValueError):
            return None
        same = mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
        return patches if same else None

    def _take_around(self) -> None:
        """Let this copy of the processor leave out what the family has round an image.

        It is written in the text instead, outside the marks: it may be one token with the text
        beside it. Raises InputError where the processor has something else there.
        """
        before, after = self.family.around
        if not before and not after:
            return
        whole = getattr(self.processor, "full_image_sequence", "")
        if not (whole.startswith(before) and whole.endswith(after)):
            raise InputError(
                f"{self.processor_path}: its processor makes {whole[:20]!r}...{whole[-20:]!r} of "
                f"an image, expected {before!r} before and {after!r} after it; use the processor "
                f"of the published {self.family.name} model"
            )
        self.processor.full_image_sequence = whole.removeprefix(before).removesuffix(after)

    # -- one processor call ------------------------------------------------------------------

    def _encode(
        self,
        row: Conversation,
        turns: tuple[Turn, ...],
        prompt: bool,
        pictures: list[Any] | None = None,
    ) -> _Encoded:
        if row.images and not self.family.has_vision:
            raise RowError("too_many_images", f"{len(row.images)} images for a text-only model")
        if len(row.images) > 1 and not self.many_images:
            raise RowError(
                "too_many_images",
                f"{len(row.images)} images in a row, and --pack_multi_image is off",
            )
        slots = sum(not isinstance(part, Text) for turn in turns for part in turn.parts)
        for token in self._reserved:
            if any(token in turn.text for turn in turns):
                what = f"a rendered text has {token}, which only a processor writes: it must have "
                raise RowError("reserved_token", what + "<image> in the place of each picture")
        hidden = Typed(self._typed, turns, row.tools)
        turns, tools = hidden.turns, hidden.tools
        text = self.template.render(turns, tools, prompt)
        if prompt:  # earlier answers are parted from their prompts as in training, without loss
            openings = self.template.openings(turns, tools, text).values()
            answers = [slice(at, at) for at in openings if at is not None]
            check_others(turns, tools, text)
        else:
            answers = self.template.answers(turns, tools, text)
            stop = self.template.last_end
            if answers and stop and not text[answers[-1]].rstrip().endswith(stop):
                start, end = answers[-1].start, answers[-1].stop
                text = text[:end] + stop + text[end:]
                answers[-1] = slice(start, end + len(stop))
        text, typed = hidden.marked(text)
        plain_text = _unmarked(text, typed)
        if slots:
            text, answers = self._write_around(text, answers)
        text, answers, marks = self._place_marks(text, answers, typed, slots)
        if slots:
            answers = self._without_images(text, answers)
        plain = self._tokenize(text)
        # Hopeless rows (a book as a question) go before their images cost anything.
        least = len(plain["input_ids"]) - len(marks)
        self._check_length(least, " before its images are expanded" if slots else "")
        pictures = self.pictures(row, slots) if pictures is None else pictures[:slots]
        if pictures and self.patches is not None:
            out = self._expanded(self.patches, plain["input_ids"], pictures)
        else:
            out = self.call(text, pictures)
        example, ids = self._align(plain, answers, marks, out, slots)
        example.where = row.where
        example.fields["loss_weight"] *= row.weight
        self._check_length(len(example), " with its images expanded" if slots else "")
        example.fields["positions"] = self.positions(example.fields)
        return _Encoded(example, plain_text, ids)

    def _check_length(self, tokens: int, when: str) -> None:
        if tokens > self.longest:
            setting = "--max_length" if self.longest == self.max_length else "--max_tokens_per_gpu"
            raise RowError(
                "too_long",
                f"{tokens} tokens{when}, the limit is {self.longest}: "
                f"raise {setting} or leave the row out",
            )

    def _write_around(self, text: str, answers: list[slice]) -> tuple[str, list[slice]]:
        """The text with what the family has round each image, and the answers' spans in it."""
        placeholder, (before, after) = self.family.placeholder or "", self.family.around

        def moved(at: int) -> int:
            return at + text.count(placeholder, 0, at) * len(before + after)

        answers = [slice(moved(span.start), moved(span.stop)) for span in answers]
        return text.replace(placeholder, before + placeholder + after), answers

    def _without_images(self, text: str, answers: list[slice]) -> list[slice]:
        """The parts of `answers` that are none of an image's, in the text with marks."""
        before, after = self.family.around
        image = re.escape(f"{before}{MARK}{self.family.placeholder}{MARK}{after}")
        parts = []
        for span in answers:
            edges = [span.start]
            for found in re.compile(image).finditer(text, span.start, span.stop):
                edges += found.span()
            parts += [slice(a, b) for a, b in zip(edges[::2], [*edges[1::2], span.stop])]
        return parts

    def _place_marks(
        self, text: str, answers: list[slice], typed: list[str], slots: int
    ) -> tuple[str, list[slice], list[str | None]]:
        """Add marks round slots that the processor expands, and at answer starts inside a token.

        Returns the text, the answers' spans in it, and for each mark the text that it stands for
        (None: a mark that opens an image slot).
        """
        cuts: list[tuple[int, str | None]] = []  # position in the text, what the mark stands for
        if slots:
            placeholder = self.family.placeholder or ""
            found = [m.start() for m in re.finditer(re.escape(placeholder), text)]
            if len(found) != slots:
                raise RowError(
                    "template",
                    f"the chat template made {len(found)} image slots of {slots} images",
                )
            for at in found if self.family.expands else ():
                cuts += [(at, None), (at + len(placeholder), "")]
        cuts += [(span.start, "") for span in answers if self._inside_token(text, span.start)]
        literals = iter(typed)
        marks: list[str | None] = []
        pieces: list[str] = []
        moved = [[span.start, span.stop] for span in answers]
        last = 0
        for at, meaning in sorted(cuts, key=lambda cut: cut[0]):
            piece = text[last:at]
            marks += [next(literals) for _ in range(piece.count(MARK))]
            marks.append(meaning)
            pieces += [piece, MARK]
            for new, span in zip(moved, answers):
                new[0] += span.start >= at
                new[1] += span.stop > at
            last = at
        marks += list(literals)
        return "".join([*pieces, text[last:]]), [slice(*span) for span in moved], marks

    def _inside_token(self, text: str, at: int) -> bool:
        """Whether some token of `text` holds characters of both sides of `at`."""
        window = text[max(0, at - 64) : at + 64]
        here = min(at, 64)
        return any(a < here < b for a, b in self._tokenize(window)["offset_mapping"])

    def _tokenize(self, text: str) -> dict[str, Any]:
        return self.tokenizer(
            text,
            add_special_tokens=self._needs_start(text),
            return_offsets_mapping=True,
            verbose=False,
        )

    def _needs_start(self, text: str) -> bool:
        """Whether a processor starts this text with a token of the tokenizer's (as transformers'
        own do, unless the chat template has written it); plain tokenizers leave it to templates."""
        start = self.tokenizer.bos_token
        return self.family.has_vision and not (start and text.startswith(start))

    def _expanded(
        self, patches: Patches, ids: list[int], pictures: list[Any]
    ) -> dict[str, torch.Tensor]:
        """As `call`, by ids in which each picture is one token still."""
        try:
            out = patches(pictures)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise _refused(pictures, error) from error
        slot = self.processor.image_token_id
        short = torch.tensor(ids)
        is_slot = short == slot
        if int(is_slot.sum()) != len(pictures):
            raise RowError("template", f"{int(is_slot.sum())} slots for {len(pictures)} images")
        times = torch.ones_like(short)
        times[is_slot] = out["image_grid_thw"].prod(-1) // patches.merge**2
        full = short.repeat_interleave(times)[None]
        return out | {"input_ids": full, "mm_token_type_ids": (full == slot).long()}

    def call(self, text: str, images: list[Any]) -> dict[str, torch.Tensor]:
        """What the processor makes of one text and its pictures; RowError where it refuses."""
        if not self.family.has_vision:
            ids = self.tokenizer([text], add_special_tokens=False, return_tensors="pt")
            return {"input_ids": ids["input_ids"]}
        try:
            nested = self.family.remote
            out = self.processor(
                text=[text],
                images=[images] if images or nested else None,
                add_special_tokens=self._needs_start(text),
                return_tensors="pt",
            )
            return flatten(out) if nested else out
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if not images:
                raise RowError("template", f"the processor refuses the text: {error}") from error
            raise _refused(images, error) from error

    def _align(
        self,
        plain: dict[str, Any],
        answers: list[slice],
        marks: list[str | None],
        out: dict[str, torch.Tensor],
        slots: int,
    ) -> tuple[Example, list[int]]:
        """Labels for the expanded ids, the marks taken out; and the ids before expansion."""
        short, offsets = plain["input_ids"], plain["offset_mapping"]
        full = out["input_ids"][0].tolist()
        token_keys = [n for n, k in self.family.keys.items() if k.kind == "token" and n in out]
        columns = {n: out[n][0] for n in token_keys}
        new: dict[str, list[torch.Tensor]] = {n: [] for n in ("input_ids", "labels", *columns)}
        unexpanded: list[int] = []

        def add(ids: list[int], loss: bool | torch.Tensor, values: slice) -> None:
            tokens = torch.tensor(ids, dtype=torch.int64)
            new["input_ids"].append(tokens)
            with_loss = loss if isinstance(loss, torch.Tensor) else torch.tensor(loss)
            new["labels"].append(torch.where(with_loss, tokens, IGNORE))
            for name, column in columns.items():
                here = column[values]
                if len(here) != len(ids):  # one value for all of them
                    here = here.repeat_interleave(len(ids), 0)
                new[name].append(here)

        stops = [(span.start, span.stop) for span in answers]
        ends = torch.tensor([end for _, end in offsets], dtype=torch.int64)
        learned = torch.zeros(
            len(ends), dtype=torch.bool
        )  # by the place of a token's last character
        for x, y in stops:
            learned |= (ends > x) & (ends <= y)
        if self.image_ids:
            learned &= ~torch.isin(torch.tensor(short), torch.tensor(sorted(self.image_ids)))
        parts_short, parts_full = split_at(short, self.mark_id), split_at(full, self.mark_id)
        if len(parts_short) != len(parts_full) or len(parts_full) != len(marks) + 1:
            raise RowError("template", "the processor moved or repeated a part of the text")
        for j, ((a, ids), (b, ids_full)) in enumerate(zip(parts_short, parts_full)):
            if j > 0 and marks[j - 1] is None:  # an image slot: what the processor made of it
                self._check_edges(ids_full)
                add(ids_full, False, slice(b, b + len(ids_full)))
                unexpanded += ids
                continue
            if j > 0 and marks[j - 1]:
                start = offsets[a - 1][0]
                literal = self._splitting.encode(
                    marks[j - 1], add_special_tokens=False, split_special_tokens=True
                )
                # Other keys have of these tokens what the processor gave their mark.
                add(literal, any(x <= start < y for x, y in stops), slice(b - 1, b))
                unexpanded += literal
            if ids != ids_full:
                raise RowError("template", "the processor changed text outside the image slots")
            unexpanded += ids
            add(ids, learned[a : a + len(ids)], slice(b, b + len(ids)))
        fields = {name: torch.cat(values) for name, values in new.items()}
        fields["labels"][:1] = IGNORE  # nothing predicts the first token
        fields["loss_weight"] = (fields["labels"] != IGNORE).float()
        fields |= {
            n: out[n] for n, k in self.family.keys.items() if k.kind == "packed" and n in out
        }
        fields |= {
            n: out[n][0] for n, k in self.family.keys.items() if k.kind == "padded" and n in out
        }
        # Example checks lengths; positions are set by the caller once the ids are final.
        return Example(fields, self.keys, images=slots), unexpanded

    def _check_edges(self, ids: list[int]) -> None:
        """Raises RowError where plain text, which could join the text beside it, ends a slot."""
        if not ids or not {ids[0], ids[-1]} <= self.image_ids:
            text = self.tokenizer.decode(ids)
            raise RowError(
                "template",
                f"the processor makes {text[:20]!r}...{text[-20:]!r} of an image, with plain text "
                "at an end, whose tokens may reach into the text beside it: use the processor of "
                f"the published {self.family.name} model",
            )

    def _limit(self, wanted: int | None) -> int:
        text = self.config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None) or 2**31
        if wanted is not None and wanted > limit:
            raise InputError(f"--max_length {wanted} is above the model's limit of {limit} tokens")
        return wanted or limit


def open_renderer(settings: Any) -> Renderer:
    """The renderer that a run with these settings has. InputError: no such model."""
    model, data = settings.model, settings.data
    processor = model.processor_name_or_path
    return Renderer(
        local_folder(model.vlm_model_name_or_path),
        local_folder(processor) if processor else None,
        chat_template=model.chat_template if settings.prompts.apply_chat_template else "none",
        image_size=data.image_size,
        image_strategy=data.image_strategy,
        max_length=data.max_length,
        budget=settings.batch.max_tokens_per_gpu,
        many_images=data.pack_multi_image,
        trust_remote_code=model.trust_remote_code,
    )


def _refused(images: list[Any], error: Exception) -> RowError:
    sizes = ", ".join(f"{image.width} x {image.height}" for image in images[:9])
    return RowError(
        "bad_image",
        f"the processor refuses its image(s) of {sizes} pixels: {error}; a thin one can be "
        "padded with --image_strategy pad_square",
    )


def _ramp(width: int, height: int) -> Pil.Image:
    """A picture without two equal parts."""
    place = range(width * height)
    picture = Pil.new("RGB", (width, height))
    picture.putdata([(7 * i % 256, i // 3 % 256, 255 - i % 251) for i in place])
    return picture


def _unmarked(text: str, typed: list[str]) -> str:
    """The text with what a person typed in the place of each mark."""
    parts = text.split(MARK)
    return "".join(part for pair in zip(parts, [*typed, ""]) for part in pair)


def split_at(ids: list[int], mark: int) -> list[tuple[int, list[int]]]:
    """(start, ids) of each run between marks."""
    runs, start = [], 0
    for i, token in enumerate([*ids, mark]):
        if token == mark:
            runs.append((start, ids[start:i]))
            start = i + 1
    return runs
