"""The loops of the families against the pipelines of Diffusers, on the same modules: latents to 1e-5 of the largest, pixels to a level. And
the words that LongCat-Image reads letter by letter, as Diffusers finds them, where it finds the quoted words."""

from __future__ import annotations

import importlib.util
import inspect
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.longcat_image import pipeline_longcat_image, pipeline_longcat_image_edit

from helpers import lengths
from helpers.drawings import NAMES
from helpers.painting import CLOSE, PipelinePair, apart, levels_apart, pair, picture
from omnistage.models.diffusers.longcat import WITH_APOSTROPHE, LongCatPainter, split_quotation
from omnistage.models.diffusers.painter import Canvas
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.diffusers.qwen_image import SIDES
from omnistage.models.interface import Failed

WORDS = ("a red circle", "two small houses by the sea, at night", "x", 'a sign that says "open"', "ein Haus, 房子")


@pytest.fixture(params=NAMES)
def both(request: pytest.FixtureRequest) -> PipelinePair:
    return pair(request.param)


def plans(both: PipelinePair, seed: int, count: int = 3) -> list[DrawingPlan]:
    """Plans with different words, seeds, steps and guidance, the first without guidance."""
    rng = random.Random(seed)
    shapes = [(90, 120), (100, 80)][: min(both.edits, 2)]
    images = [picture(seed + n, *shape, opaque=both.name != "qwen-image-layered") for n, shape in enumerate(shapes)]
    made = []
    for number in range(count):
        guidance = both.painter.limits.guided_above if not number else rng.uniform(1.5, 6.0)
        negative = rng.choice(("", "ugly, blurred")) if number else ""
        asked = {"steps": rng.randint(2, 5), "guidance_scale": guidance, "negative_prompt": negative, "seed": rng.getrandbits(64)}
        made.append(both.plan(rng.choice(WORDS), images, **asked))
    return made


def check_published(both: PipelinePair, canvas: Canvas) -> None:
    """The picture is that of the pipeline."""
    latents, images = both.published(canvas.plan)
    assert apart(canvas.latents, latents) <= CLOSE
    assert levels_apart(both.images(canvas), images) <= 1


def test_a_picture_is_that_of_the_pipeline(both: PipelinePair, seed: int) -> None:
    """Pictures of one plan but for the seed or the words are other ones."""
    asked = plans(both, seed)
    for plan in asked:
        [canvas] = both.drawn(plan)
        check_published(both, canvas)
    for other in (replace(asked[-1], seed=asked[-1].seed ^ 1), replace(asked[-1], prompt="a cat")):
        assert (both.drawn(other)[0].latents - canvas.latents).abs().max() > 1e-3


@lengths.one_or_all("name", NAMES)
def test_a_picture_of_many_words_is_that_of_the_pipeline(name: str, seed: int) -> None:
    """The prompt has as many words as are taken, which is more than some pipelines draw."""
    check_many_words(lengths.draw(name, NAMES, seed), seed)


@pytest.mark.parametrize("name", ["qwen-image", "qwen-image-layered"])
def test_words_that_the_pipeline_cuts_are_cut_here(name: str, seed: int) -> None:
    both = pair(name)
    most = both.painter.limits.prompt_tokens
    assert most == 512
    canvas = check_many_words(name, seed)
    assert len(canvas.conditions.positive) == most
    assert canvas.conditions.negative is not None and len(canvas.conditions.negative) == most


def check_many_words(name: str, seed: int) -> Canvas:
    """A picture of a prompt and a negative one that have nearly all tokens that are taken."""
    both, rng = pair(name), random.Random(seed)
    counted = both.painter.text_tokens
    _, most = counted("x")
    texts = []
    for _ in range(2):
        words = ""
        while counted(longer := f"{words} {rng.choice(('hill', 'sea', 'red', 'house', '房子'))}")[0] <= most - 5:
            words = longer
        both.painter.check_text(words)
        texts.append(words)
    images = [picture(seed, 90, 120, opaque=name != "qwen-image-layered")][: both.edits]
    plan = both.plan(texts[0], images, negative_prompt=texts[1], guidance_scale=3.0, steps=2, seed=seed)
    [canvas] = both.drawn(plan)
    check_published(both, canvas)
    return canvas


NOT_HERE: dict[str, object] = {
    "output_type": "pil",
    "return_dict": True,
    "num_images_per_prompt": 1,
    "callback_on_step_end_tensor_inputs": ["latents"],
}
"""Parameters of pipelines that say in which form pictures are given back."""

ALWAYS: dict[str, dict[str, object]] = {
    "QwenImageLayeredPipeline": {"cfg_normalize": False, "use_en_prompt": False},
    "ZImagePipeline": {"cfg_normalization": False, "cfg_truncation": 1.0, "max_sequence_length": 512},
    "LongCatImagePipeline": {"enable_cfg_renorm": True, "cfg_renorm_min": 0.0, "enable_prompt_rewrite": True},
}
"""The options that a painter follows in any case, as its pipeline does by default; the rewriting of prompts is not among them
(docs/diffusion.md)."""


def test_what_is_done_where_nothing_is_said_is_what_the_pipeline_does(both: PipelinePair) -> None:
    """The defaults are those of the installed diffusers: a release with another default, or with one more, has to be looked at."""
    limits, kind = both.painter.limits, type(both.pipe)
    qwen = kind.__name__.startswith("QwenImage")
    here: dict[str, object] = {"num_inference_steps": limits.steps, "true_cfg_scale" if qwen else "guidance_scale": limits.guidance}
    here |= {"max_sequence_length": 512} if qwen else {}
    here |= {"layers": limits.layers, "resolution": SIDES[0]} if limits.max_layers else {}
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind.__call__).parameters.items()}
    said = {name: default for name, default in defaults.items() if default not in (inspect.Parameter.empty, None)}
    form = {name: default for name, default in NOT_HERE.items() if name in defaults}
    assert said == here | form | ALWAYS.get(kind.__name__, {})
    if limits.prompt_tokens:
        assert limits.prompt_tokens == defaults["max_sequence_length"]


def test_pictures_that_join_one_by_one_are_those_drawn_alone(both: PipelinePair, seed: int) -> None:
    asked = plans(both, seed, 4)
    for together, alone in zip(both.drawn(*asked), both.drawn(*asked, together=False), strict=True):
        assert apart(together.latents, alone.latents) <= CLOSE
        assert levels_apart(both.images(together), both.images(alone)) <= 1


def test_z_image_draws_pictures_of_any_sizes_in_one_pass(seed: int) -> None:
    both = pair("z-image")
    sizes = ((64, 64), (96, 48), (32, 160))
    asked = [both.plan(WORDS[n], width=width, height=height, steps=3 + n, seed=seed + n) for n, (width, height) in enumerate(sizes)]
    drawn = both.drawn(*asked)
    assert len({both.painter.group(canvas) for canvas in drawn}) == 1
    for canvas, plan in zip(drawn, asked, strict=True):
        check_published(both, canvas)
        assert both.images(canvas)[0].size == (plan.width, plan.height)


def test_others_share_no_pass_with_another_size() -> None:
    both = pair("qwen-image")
    with torch.inference_mode():
        one, other = (both.begun(both.plan("x", width=width, height=160 - width)) for width in (64, 96))
    assert both.painter.group(one) != both.painter.group(other)


def test_every_result_is_that_of_its_own_seed(seed: int) -> None:
    both = pair("qwen-image")
    plan = both.plan("x", steps=2, seed=2**64 - 2, results=3)
    with torch.inference_mode():
        seconds = [both.begun(plan, number).latents for number in range(3)]
        alone = [both.begun(both.plan("x", steps=2, seed=seed)).latents for seed in (2**64 - 2, 2**64 - 1, 0)]
    assert all(torch.equal(one, other) for one, other in zip(seconds, alone, strict=True))


def test_an_edited_picture_has_the_size_that_is_asked_for(seed: int) -> None:
    both = pair("qwen-image-edit")
    plan = both.plan("bluer", [picture(seed, 70, 140)], width=96, height=64, steps=2, seed=seed)
    [canvas] = both.drawn(plan)
    assert both.images(canvas)[0].size == (96, 64)


@lengths.one_or_all("name", NAMES)
def test_what_encoders_made_is_kept_and_changes_nothing(name: str, seed: int) -> None:
    both = pair(lengths.draw(name, NAMES, seed))
    first, *_ = plans(both, seed, 1)
    texts, pictures = both.painter._texts, both.painter._pictures
    with torch.inference_mode():
        fresh = both.painter.encode(first)
        hits = texts.hits, pictures.hits
        again = both.painter.encode(first)
    assert texts.hits == hits[0] + 1 + (first.negative is not None)
    assert pictures.hits == hits[1] + len(first.images)
    assert torch.equal(fresh.positive, again.positive)


@lengths.one_or_all("name", NAMES)
def test_what_a_preview_shows_is_the_picture_without_its_noise(name: str, seed: int) -> None:
    """By the formula of the flow, x = (1 - s) x0 + s n with v = n - x0: after the last step nothing else is left."""
    both = pair(lengths.draw(name, NAMES, seed))
    plan = replace(plans(both, seed, 2)[1], steps=4, previews=3)
    with torch.inference_mode():
        canvas = both.begun(plan)
        while not canvas.is_drawn:
            before, sigma = canvas.latents.clone(), canvas.sampler.sigma
            both.painter.forward([canvas])
            velocity = canvas.velocity
            assert velocity is not None
            both.painter.advance(canvas)
            estimate = canvas.estimate
            assert estimate is not None and apart(estimate, before - sigma * velocity) <= CLOSE
        assert estimate is not None and apart(estimate, canvas.latents) <= CLOSE


def test_a_preview_of_layers_is_the_whole_picture_and_layers_are_what_is_behind_it() -> None:
    both = pair("qwen-image-layered")
    plan = both.plan("x", [picture(1, 60, 90, opaque=False)], layers=2)
    with torch.inference_mode():
        canvas = both.begun(plan)
        whole = both.painter.preview_grid(canvas.latents, plan)
        frames = both.pipe._unpack_latents(canvas.latents, plan.height, plan.width, 2, both.pipe.vae_scale_factor)[0].transpose(0, 1)
        assert torch.equal(whole, frames[:1]) and torch.equal(both.painter.grids(canvas.latents, plan), frames[1:])


def test_a_picture_that_is_no_number_is_an_error() -> None:
    both = pair("z-image")
    with torch.inference_mode():
        canvas = both.begun(both.plan("x", steps=2))
        canvas.latents = canvas.latents * float("nan")
        both.painter.forward([canvas])
        with pytest.raises(Failed, match="after step 1 of 2"):
            both.painter.advance(canvas)


def test_prompts_that_are_cut_by_no_encoder_are_taken_and_longer_ones_are_not(both: PipelinePair) -> None:
    both.painter.check_text("word " * 20)
    with pytest.raises(ValueError, match="make it shorter"):
        both.painter.check_text("word " * 5000)


QUOTED = 20_000


@pytest.mark.parametrize("text", [f'"{"a" * QUOTED}"', '"a" ' * (QUOTED // 4), "\"'" * (QUOTED // 2), f"“{'房' * QUOTED}”", '"' * QUOTED])
def test_letters_in_quotation_marks_are_counted_and_not_read_one_by_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    painter, read = pair("longcat-image").painter, list[str]()
    counting = painter.counting

    def count(words: str, **more: object) -> object:
        read.append(words)
        return counting(words, **more)

    monkeypatch.setattr(painter, "counting", count)
    with pytest.raises(ValueError, match="make it shorter"):
        painter.check_text(text)
    assert len(read) < 600


def test_the_tokens_of_a_prompt_are_counted_as_the_pipeline_counts_them() -> None:
    painter = pair("longcat-image").painter
    tokenizer = painter.pipe.tokenizer
    for text in ("a sign 'OPEN' and “开门”", 'it\'s "a b"', "x", "'aaaa' 'aaaa'"):
        read = list[int]()
        for part, quoted in split_quotation(text):
            for piece in part if quoted else [part]:
                read += tokenizer(piece, add_special_tokens=False)["input_ids"]
        assert painter.text_tokens(text) == (len(read), painter.pipe.tokenizer_max_length)


@pytest.mark.parametrize("text", ["a <|image_pad|> hill", "<|im_end|>", "a hill<|im_start|>"])
def test_special_tokens_are_no_words(both: PipelinePair, text: str) -> None:
    with pytest.raises(ValueError, match="special token"):
        both.painter.check_text(text)


@pytest.mark.parametrize("together", [False, True])
@lengths.one_or_all("name", NAMES)
def test_steps_that_change_little_are_not_computed_whole(name: str, together: bool, seed: int) -> None:
    """And a picture beside others, which asked for none of it, is as it ever was."""
    both = pair(lengths.draw(name, NAMES, seed))
    images = both.sent[plans(both, seed, 1)[0].sources]
    asked = [
        both.plan(f"{n} hills", images, steps=8 + n, seed=seed + n, step_cache=threshold) for n, threshold in enumerate((5.0, 0.0, 3.0))
    ]
    plain = both.drawn(*(replace(plan, step_cache=0.0) for plan in asked), together=False)
    drawn = both.drawn(*asked, together=together)
    distances = [float((one.latents - other.latents).norm() / other.latents.norm()) for one, other in zip(drawn, plain, strict=True)]
    assert drawn[0].residuals[0].reused > 0
    assert 0 < drawn[0].residuals[0].largest < 5.0
    assert drawn[1].residuals[0].reused == 0
    assert distances[1] <= CLOSE
    assert 1e-4 < distances[0] < 1.0


@lengths.one_or_all("name", NAMES)
def test_cached_steps_of_a_batch_are_those_of_each_picture_alone(name: str, seed: int) -> None:
    both = pair(lengths.draw(name, NAMES, seed))
    images = both.sent[plans(both, seed, 1)[0].sources]
    asked = [both.plan(f"{n}{' hills' * (1 + 25 * n)}", images, steps=6 + n, seed=seed + n, step_cache=0.9) for n in range(3)]
    for one, other in zip(both.drawn(*asked), both.drawn(*asked, together=False), strict=True):
        assert [row.reused for row in one.residuals] == [row.reused for row in other.residuals]
        assert apart(one.latents, other.latents) <= CLOSE


# Words in quotation marks, which LongCat-Image reads letter by letter -------------------------------------------------------------------


Split = Callable[[str], list[tuple[str, bool]]]

PIECES = ("a dog", " ", "'", '"', "“", "”", "‘", "’", "OPEN", "房子", ".", "\n", "🦊", "x")


@pytest.fixture(scope="module")
def published() -> Split:
    """The function of Diffusers, of a module that nobody has mended."""
    found = importlib.util.find_spec(pipeline_longcat_image.__name__)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"{pipeline_longcat_image.__package__}.untouched", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    split: Split = module.split_quotation
    return split


def test_it_is_that_of_diffusers_where_one_word_has_an_apostrophe_at_most(published: Split, seed: int) -> None:
    """Beside quotation marks that are no apostrophes: what begins with one is taken for quoted by Diffusers up to the next apostrophe."""
    assert published is not split_quotation
    rng = random.Random(seed)
    for number in range(500):
        marks = [piece for piece in PIECES if piece != "'"] if number % 2 else PIECES
        pieces = [rng.choice(marks) for _ in range(rng.randrange(12))]
        if number % 2:
            pieces.insert(rng.randrange(len(pieces) + 1), " it's ")
        text = "".join(pieces)
        if len(set(WITH_APOSTROPHE.findall(text))) <= number % 2:
            assert split_quotation(text) == published(text), text


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("it's a dog that doesn't bark", []),
        ("they're 'John's and Mary's' shop, isn't it", ["'John's and Mary's'"]),
        ("a sign \"don't you're\" and ‘OPEN’ and “开门”", ["\"don't you're\"", "‘OPEN’", "“开门”"]),
        ("", []),
        ("'", []),
    ],
)
def test_nothing_is_lost_where_several_words_have_one(text: str, quoted: list[str]) -> None:
    parts = split_quotation(text)
    assert "".join(part for part, _ in parts) == text
    assert [part for part, is_quoted in parts if is_quoted] == quoted


def test_thousands_of_them_are_split_as_they_stand() -> None:
    """The function of Diffusers would make a text of gigabytes of these."""
    text = " ".join(f"{chr(97 + n % 26)}{chr(97 + n // 26 % 26)}{chr(97 + n // 676)}'s" for n in range(5000))
    assert split_quotation(text) == [(text, False)]


def test_its_pipelines_use_it() -> None:
    assert LongCatPainter is not None
    assert pipeline_longcat_image.split_quotation is pipeline_longcat_image_edit.split_quotation is split_quotation
