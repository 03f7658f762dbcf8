"""Drawings by whole calls of any pipeline of Diffusers, for pictures, films or sound, without a loop of our own. Every step reports
progress and can be cancelled, and similar requests share a call. There are no previews, and no request joins a call that has begun.

A caller moves a call on step by step. The call runs on a thread of its own, which goes on only while a caller waits in `resume` for the
next step. So a pipeline with a closed loop shows its progress, can be given up between two steps, and takes turns with others. Each call
has a shallow copy of the pipeline and a scheduler of its own, since both hold the state of the call; the models are shared, and no two
calls compute at once."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image

from omnistage.models.diffusers.model import PROGRESS
from omnistage.models.diffusers.options import Defaults
from omnistage.models.diffusers.own_options import GUIDANCE, Value, own_options
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan, EditedPicture, crop_to_shape, in_shape
from omnistage.models.diffusers.results import results_of
from omnistage.models.diffusers.sampling import min_steps
from omnistage.models.interface import BadRequest, Content, Drawn, Failed, Note, PortSpec, StepsDone, Wanted
from omnistage.models.steps.loop import Aside
from omnistage.models.worker import LOOK_S, still_working

SCALES = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
USUAL_SIDE = 512
REFUSALS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that pipelines raise before their first step for arguments that they cannot use."""
UNABLE = (AttributeError, ImportError, NameError, TypeError)
"""Errors that a pipeline raises for an option which it cannot follow with any value."""
TRIED: Mapping[type, Value] = {bool: False, int: 0, float: 0.0, str: "a"}
FAULTS = (Failed, torch.OutOfMemoryError, torch.AcceleratorError)
NO_MEMORY = re.compile(r"allocate memory|CUDA error|CUBLAS|CUDNN", re.IGNORECASE)
"""Words of errors that torch has no type for."""
ANY_SIGMA = 1e6
"""The largest sigma that may be given. It is large because schedulers that are no flow have large sigmas."""


class CallJob:
    """A plan, and its place in a call that other jobs may share. place: its number among the jobs of the call. step: the last step that the
    job has seen. results, notes: its results and what the client should know, once the call has ended."""

    def __init__(self, plan: DrawingPlan, ports: Wanted) -> None:
        self.plan, self.ports = plan, ports
        self.call: PipelineCall | None = None
        self.place = 0
        self.step = 0
        self.results: Sequence[Any] | None = None
        self.notes: Sequence[str] = ()


class WholeDrawing:
    """Draws by whole calls: a `Drawing` and an `Artist`. model: its name, which files of pictures state. threads: number for torch."""

    def __init__(self, pipe: DiffusionPipeline, defaults: Defaults, model: str, threads: int) -> None:
        self._pipe, self._threads = pipe, threads
        self._takes = inspect.signature(type(pipe).__call__).parameters
        self.product = results_of(pipe, self._takes, model)
        self._calls: dict[PipelineCall, set[CallJob]] = {}  # The jobs of each call that are not given up.
        self._limits = defaults.applied(self.product.applied(self._own_limits()))

    @property
    def limits(self) -> DrawingLimits:
        return self._limits

    def _own_limits(self) -> DrawingLimits:
        """The limits of the pipeline, from the parameters of its call and from its parts."""
        multiple, sized = self._multiple, "width" in self._takes and "height" in self._takes
        width, height = (self._usual_side(name) // multiple * multiple for name in ("width", "height"))
        guidance = self._takes[self._scale].default if self._scale else 0.0
        steps = self._takes["num_inference_steps"].default if "num_inference_steps" in self._takes else 1
        limits = DrawingLimits(
            multiple=multiple,
            width=width,
            height=height,
            steps=int(steps),
            min_steps=self._min_steps(),
            scheduled_steps=min_steps(self._pipe.scheduler),
            guidance=float(guidance) if isinstance(guidance, int | float) else 0.0,
            guidable=self._scale is not None,
            negatable="negative_prompt" in self._takes,
            images=(1, 1) if "image" in self._takes else (0, 0),
            sized=sized,
            max_results=8 if "num_images_per_prompt" in self._takes else 1,
            previewed=False,
            step_cached=False,
            max_sigma=ANY_SIGMA if self._takes_sigmas() else 0.0,
            strength=self._strength,
            masked="mask_image" in self._takes,
            controlled="control_image" in self._takes,
            options=tuple(
                option for option in own_options(type(self._pipe).__call__, self._scale) if option.name not in self._ignored_options
            ),
        )
        return replace(limits, min_side=max(limits.min_side, multiple * self._min_places))

    @property
    def _ignored_options(self) -> set[str]:
        """Options that the pipeline would pass on to the step of a scheduler, and that the step of this scheduler does not take. The
        pipeline drops them silently."""
        prepare = getattr(self._pipe, "prepare_extra_step_kwargs", None)
        step_parameters = inspect.signature(self._pipe.scheduler.step).parameters
        return set(inspect.signature(prepare).parameters) - set(step_parameters) if prepare else set()

    def leave_out(self, plan: DrawingPlan) -> Mapping[str, str]:
        """Stop offering the options that the pipeline cannot follow. Returns them, each with the reason. plan: drawn with each option, up
        to the first step. Options that have a default are in every drawing, and need no trial."""
        unable = {}
        for option in self._limits.options:
            if self._takes[option.name].default is not None:
                continue
            tried = replace(plan, own_options=((option.name, TRIED[option.kind]),))
            call = PipelineCall(self._pipe, self._arguments([tried]), self.product.listed, self._threads)
            try:
                call.resume()
            except Exception as error:  # any other error comes from this value: the option may have other values
                if isinstance(error, UNABLE):
                    unable[option.name] = " ".join(str(error).split())[:300]
            finally:
                call.close()
        self._limits = replace(self._limits, options=tuple(each for each in self._limits.options if each.name not in unable))
        return unable

    def _takes_sigmas(self) -> bool:
        return "sigmas" in self._takes and "sigmas" in inspect.signature(self._pipe.scheduler.set_timesteps).parameters

    @property
    def _strength(self) -> float | None:
        """The pipeline's default strength; None if its call has none, or no number as the default."""
        default = self._takes["strength"].default if "strength" in self._takes else None
        return float(default) if isinstance(default, int | float) else None

    def _min_steps(self) -> int:
        """The smallest number of steps. A pipeline that begins from a picture leaves out the first steps, and too few would leave none."""
        strength = self._strength
        return max(math.ceil(1 / strength) if strength is not None and 0 < strength <= 1 else 1, min_steps(self._pipe.scheduler))

    @cached_property
    def _multiple(self) -> int:
        """Sides are multiples of this many pixels: the scale of the pipeline's processor of pictures, else the VAE's (times the patch)."""
        pipe = self._pipe
        if (processor := getattr(pipe, "image_processor", None)) is not None:
            return int(processor.config.vae_scale_factor)
        scale = next((int(value) for name in SCALES if (value := getattr(pipe, name, None))), 8)
        if not hasattr(pipe, "video_processor") or self._denoiser is None:
            return scale
        patch = self._denoiser.config.get("patch_size")
        return scale * (patch[-1] if isinstance(patch, Sequence) else patch or 1)

    @property
    def _min_places(self) -> int:
        """The smallest number of places of a side of the latents: convolutions that pad by reflection need more places than they add."""
        parts = getattr(self._pipe, "vae", None)
        padded = [part for part in parts.modules() if getattr(part, "padding_mode", "") == "reflect"] if parts is not None else []
        return 1 + max((max(part.padding) for part in padded if isinstance(part.padding, tuple)), default=0)

    @property
    def _denoiser(self) -> Any:
        """The model that each step calls."""
        return getattr(self._pipe, "unet", None) or getattr(self._pipe, "transformer", None)

    @property
    def _scale(self) -> str | None:
        """The parameter for the scale of guidance; None if the pipeline has none."""
        return next((name for name in GUIDANCE if name in self._takes), None)

    def _usual_side(self, name: str) -> int:
        """The default of the parameter with that name, or the side that the pipeline's model was made for, in pixels."""
        if name in self._takes and isinstance(default := self._takes[name].default, int):
            return default
        size = getattr(self._pipe, "default_sample_size", None) or (self._denoiser and self._denoiser.config.get("sample_size"))
        return size * int(getattr(self._pipe, "vae_scale_factor", 8)) if isinstance(size, int) else USUAL_SIDE

    def check_text(self, text: str) -> None:
        """Checks and counts nothing: the pipeline itself cuts text that its encoder cannot read."""

    def sized(self, plan: DrawingPlan) -> DrawingPlan:
        return in_shape(plan, self._multiple)

    def edited(self, plan: DrawingPlan, image: Image) -> EditedPicture:
        """The picture unchanged: the pipeline resizes it by itself, or its processor of pictures does so in `PipelineCall`."""
        return EditedPicture(image.width, image.height, (image,))

    @property
    def draws_its_image(self) -> bool:
        return not self._limits.sized

    def tokens(self, plan: DrawingPlan) -> int:
        """The number of latent tokens of a step, guidance included, as if one token were 16 by 16 pixels, as in most models."""
        limits = self._limits
        latent_frames = 1 + (plan.frames - 1) // limits.frame_multiple if plan.frames else 1
        return -(-plan.width * plan.height // 256) * latent_frames * plan.results * (1 if plan.negative is None else 2)

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        return *self.product.ports, PortSpec(PROGRESS, Content.PROGRESS)

    def check(self, plan: DrawingPlan) -> None:
        """Checks nothing: there is no port for a history, and only the pipeline knows the results of its steps. See `PipelineCall`."""

    def job(self, plan: DrawingPlan, ports: Wanted) -> CallJob:
        return CallJob(plan, ports)

    def cost(self, job: CallJob) -> int:
        return self.tokens(job.plan)

    def decoder_share(self, job: CallJob) -> float:
        """Its pipeline has decoded the job already."""
        return 0.0

    def steps(self, job: CallJob) -> int:
        return job.plan.steps

    def key(self, job: CallJob) -> Hashable:
        """Jobs of equal keys share a call. A job with an image, or with an option that is a text, has a call of its own."""
        if job.call is not None:
            return ("call", id(job.call))
        plan = job.plan
        if plan.images or plan.control or any(isinstance(value, str) for _, value in plan.own_options):
            return ("alone", id(job))
        size = plan.width, plan.height, plan.results, plan.frames, plan.rate_hz, plan.seconds
        return ("new", *size, plan.steps, plan.sigmas, plan.guidance, plan.negative is None, plan.own_options)

    def step(self, jobs: Sequence[CallJob], aside: Aside | None) -> None:
        """Compute a step of the call of these jobs, which begins with the first step. The call waits if some of its jobs have seen its last
        step and others have not. Raises BadRequest for a value that the pipeline refuses."""
        still_working()
        call = jobs[0].call
        if call is None:
            call = PipelineCall(self._pipe, self._arguments([job.plan for job in jobs]), self.product.listed, self._threads)
            self._calls[call] = set(jobs)
            for place, job in enumerate(jobs):
                job.call, job.place = call, place
        if call.results is None and all(job.step == call.step for job in jobs):
            try:
                call.resume()
            except BaseException as error:
                for job in self._calls.pop(call, set()):
                    job.call, job.step = None, 0
                if not call.step and (field := self._refused_field(jobs[0].plan, error)):
                    reason = " ".join(str(error).split())[:300] or type(error).__name__
                    fault = f"{type(self._pipe).__name__} refuses it: {reason}; give another one, or leave it out"
                    raise BadRequest(f"diffusion.{field}", fault) from error
                raise

    def _refused_field(self, plan: DrawingPlan, error: BaseException) -> str:
        """The field whose value the pipeline refuses by this error, as only the pipeline can check it; empty if there is none."""
        limits = self._limits
        if isinstance(error, FAULTS) or NO_MEMORY.search(str(error)):
            return ""
        measures = {"frames": (plan.frames, limits.frames), "duration_s": (plan.seconds, limits.seconds)}
        measures |= {"width": (plan.width, limits.width), "height": (plan.height, limits.height), "steps": (plan.steps, limits.steps)}
        set_fields = [field for field in ("options", "sigmas", "strength") if getattr(plan, field)]
        unusual_fields = [field for field, (value, default) in measures.items() if value != default]
        if isinstance(error, REFUSALS) and set_fields:
            return set_fields[0]
        return unusual_fields[0] if isinstance(error, ValueError) and unusual_fields else ""

    def _arguments(self, plans: Sequence[DrawingPlan]) -> dict[str, Any]:
        """The arguments of a call for several plans, which differ only in prompts and seeds."""
        first = plans[0]
        generators = [torch.Generator("cpu").manual_seed(plan.seed_of(number)) for plan in plans for number in range(first.results)]
        arguments: dict[str, Any] = {
            "prompt": [plan.prompt for plan in plans] if len(plans) > 1 else first.prompt,
            "num_inference_steps": first.steps,
            "generator": generators if len(generators) > 1 else generators[0],
            "num_images_per_prompt": first.results,
            "width": first.width,
            "height": first.height,
            "output_type": self.product.output_type,
            "enable_prompt_rewrite": False,
        }
        if self._scale:
            arguments[self._scale] = first.guidance
        if any(plan.negative for plan in plans):
            arguments["negative_prompt"] = [plan.negative or "" for plan in plans] if len(plans) > 1 else first.negative
        pictures = {"image": first.images[0] if first.images else None, "mask_image": first.mask, "control_image": first.control}
        arguments |= {name: picture.resized[0] for name, picture in pictures.items() if picture}
        arguments |= {"sigmas": list(first.sigmas)} if first.sigmas else {}
        arguments |= {} if first.strength is None else {"strength": first.strength}
        arguments |= {**dict(first.own_options), **self.product.arguments(first)}
        return {name: value for name, value in arguments.items() if name in self._takes}

    def take(self, job: CallJob) -> Sequence[Drawn]:
        """Give the job its results if its call has ended; else return its progress, if that is wanted."""
        call = job.call
        assert call is not None
        if call.results is not None:
            count = job.plan.results
            job.results, job.notes = call.results[job.place * count : (job.place + 1) * count], call.notes
            return []
        job.step = call.step
        return [StepsDone(call.step, call.steps)] if PROGRESS in job.ports else []

    def is_done(self, job: CallJob) -> bool:
        return job.results is not None

    def give_up(self, job: CallJob) -> None:
        """Forget the job; a call that no job waits for any more ends at its step."""
        call = job.call
        if call is None or call not in self._calls:
            return
        self._calls[call].discard(job)
        if not self._calls[call]:
            del self._calls[call]
            call.close()

    def decode(self, job: CallJob) -> Generator[Drawn, None, None]:
        assert job.results is not None
        yield from map(Note, job.notes)
        yield from self.product.decode(job.plan, job.results, job.ports)


REST_S = 5.0
"""Seconds between two looks at a thread that did nothing since the last look."""


class _GivenUp(BaseException):
    """Nobody waits for the call. This is no Exception, because a pipeline that catches every Exception must not go on."""


class PipelineCall:
    """A call of a pipeline with `arguments`, which begins with the first `resume`. listed: makes a list of results of the pipeline's return
    value. threads: number of threads that torch may use."""

    def __init__(self, pipe: DiffusionPipeline, arguments: dict[str, Any], listed: Callable[[Any], list[Any]], threads: int) -> None:
        self._pipe, self._arguments, self._listed, self._threads = copy.copy(pipe), arguments, listed, threads
        self._pipe.set_progress_bar_config(disable=True)
        scheduler = _report_steps(copy.deepcopy(pipe.scheduler), self._stepped)
        if "sigmas" in arguments:
            scheduler = _check_sigmas(scheduler)
        scheduler.__deepcopy__ = functools.partial(_plain_copy, scheduler)
        self._pipe.scheduler = scheduler
        self.notes: list[str] = []
        """Notes for the client about the pictures that the call began with."""
        for name, processor in vars(pipe).items():
            if isinstance(processor, VaeImageProcessor):
                setattr(self._pipe, name, _fit_size(processor, arguments, self.notes))
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: BaseException | None = None
        self.step = 0
        self.steps = 0
        """The number of all steps; 0 before the first step has ended."""
        self.results: list[Any] | None = None
        """The results, once the call has ended."""

    def resume(self) -> None:
        """Go on up to the next step, or to the end after the last step; returns when it is reached. Raises the errors of the pipeline."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
            self._thread.start()
        self._turn.release()
        used_s, is_busy = self._cpu_s, True
        while not self._done.acquire(timeout=LOOK_S if is_busy else REST_S):
            before_s, used_s = used_s, self._cpu_s
            is_busy = used_s > before_s
            if is_busy:
                still_working()
        if self._error is not None:
            raise self._error

    @property
    def _cpu_s(self) -> float:
        """Processor time of the thread, in s. A thread that hangs uses none: then no work is reported, and a watcher finds it."""
        thread = self._thread
        assert thread is not None and thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread.is_alive() else 0.0

    def close(self) -> None:
        """Give the call up, if it has not ended, and wait for its end. Do not call this while the call is resumed."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._closed = True
        self._turn.release()
        self._thread.join()

    def _run(self) -> None:
        """Runs the whole call, on its own thread."""
        torch.set_num_threads(self._threads)
        self._turn.acquire()
        try:
            with torch.inference_mode():
                self.results = self._listed(self._pipe(**self._arguments))
        except _GivenUp:
            pass
        except BaseException as error:  # not handled here: it belongs to the caller of `resume`
            self._error = error
        finally:
            # A pipeline does this at its end, which it does not reach after an error or if it is given up.
            self._pipe.maybe_free_model_hooks()
            vae: Any = getattr(self._pipe, "vae", None)
            if hasattr(vae, "clear_cache"):
                vae.clear_cache()
            self._done.release()

    def _stepped(self, scheduler: Any) -> None:
        """Called on the thread of the call after each step: waits for the next `resume`, or gives the call up."""
        self.step, self.steps = self.step + 1, len(scheduler.timesteps)
        self._done.release()
        self._turn.acquire()
        if self._closed:
            raise _GivenUp


def _report_steps(scheduler: Any, stepped: Callable[[Any], None]) -> Any:
    """The scheduler, which from now on calls `stepped` after each of its steps, and raises Failed for latents that are no numbers. `step`
    is wrapped with its signature, because pipelines look at its parameters."""
    step = scheduler.step

    @functools.wraps(step)
    def report_step(*arguments: Any, **keywords: Any) -> Any:
        output = step(*arguments, **keywords)
        latents = output[0] if isinstance(output, tuple) else output.prev_sample
        if not torch.isfinite(latents).all():
            raise Failed("what is drawn is no number after a step: with these weights, words and numbers of steps it cannot be drawn")
        stepped(scheduler)
        return output

    scheduler.step = report_step
    return scheduler


def _check_sigmas(scheduler: Any) -> Any:
    """The scheduler, which from now on raises ValueError before its first step if no steps are possible with the sigmas."""
    step, set_timesteps = scheduler.step, scheduler.set_timesteps

    def check(can_be_taken: bool) -> None:
        if not can_be_taken:
            raise ValueError(f"{type(scheduler).__name__} makes no noise levels of them that differ")

    @functools.wraps(set_timesteps)
    def set_checked_timesteps(*arguments: Any, **keywords: Any) -> None:
        if isinstance(keywords.get("sigmas"), list):
            keywords["sigmas"] = np.array(keywords["sigmas"])  # UniPC computes with the argument itself; the others also take a list.
        with np.errstate(all="ignore"):  # A value that becomes no number is refused below.
            set_timesteps(*arguments, **keywords)
        levels = torch.as_tensor(scheduler.sigmas)
        check(len(scheduler.timesteps) > 0 and bool(torch.isfinite(levels).all() and levels[:-1].diff().all()))

    @functools.wraps(step)
    def checked_step(*arguments: Any, **keywords: Any) -> Any:
        if getattr(scheduler, "begin_index", None) is None:  # Then the first step is looked up by its timestep: no two may be equal.
            check(len(scheduler.timesteps.unique()) == len(scheduler.timesteps))
        return step(*arguments, **keywords)

    scheduler.step, scheduler.set_timesteps = checked_step, set_checked_timesteps
    return scheduler


def _plain_copy(scheduler: Any, memo: dict[int, Any]) -> Any:
    """A copy of the scheduler in its present state, which reports no step: pipelines use the copy for the sound of a film."""
    plain = copy.copy(scheduler)
    for name in ("step", "set_timesteps", "__deepcopy__"):
        vars(plain).pop(name, None)
    return copy.deepcopy(plain, memo)


def _fit_size(processor: Any, arguments: Mapping[str, Any], notes: list[str]) -> Any:
    """A copy of the pipeline's processor of pictures. If the pipeline would draw in the size of the sent picture, the copy resizes the
    picture to the width and height in the call's `arguments`; a picture that the pipeline has changed is not resized. A picture of another
    shape than it is resized to is cropped before, and a note is added."""
    preprocess, sides = processor.preprocess, {side: arguments[side] for side in ("width", "height") if side in arguments}
    signature = inspect.signature(preprocess)
    if len(sides) < 2 or not sides.keys() <= signature.parameters.keys():
        return processor
    resizer = copy.copy(processor)

    @functools.wraps(preprocess)
    def preprocess_in_size(image: Any, *others: Any, **keywords: Any) -> Any:
        size = sides if image is arguments.get("image") and not others else {}
        call = signature.bind(image, *others, **{**size, **keywords})
        width, height, mode, crops = (call.arguments.get(name) for name in ("width", "height", "resize_mode", "crops_coords"))
        if isinstance(image, Image) and width and height and mode in (None, "default") and crops is None:
            cropped, note = crop_to_shape(image, width, height, processor.config.vae_scale_factor)
            call.arguments[next(iter(signature.parameters))] = cropped
            notes.extend({note} - {"", *notes})
        return preprocess(*call.args, **call.kwargs)

    resizer.preprocess = preprocess_in_size
    return resizer
