"""A whole call of a pipeline of Diffusers, which a caller moves on step by step.

The call runs on a thread of its own, which goes on only while a caller waits in `resume` for the next step. So a pipeline with a closed
loop shows its progress, can be given up between two steps, and takes turns with others. Each call has a shallow copy of the pipeline and a
scheduler of its own, since both hold the state of the call; the models are shared, and no two calls compute at once.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from omnistage.models.interface import Failed
from omnistage.models.worker import LOOK_S, still_working

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
        if (processor := getattr(pipe, "image_processor", None)) is not None:
            self._pipe.image_processor = _fit_size(processor, arguments)
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
        used_s, goes_on = self._cpu_s, True
        while not self._done.acquire(timeout=LOOK_S if goes_on else REST_S):
            before_s, used_s = used_s, self._cpu_s
            if goes_on := used_s > before_s:
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
    def checked(*arguments: Any, **keywords: Any) -> None:
        if isinstance(keywords.get("sigmas"), list):
            keywords["sigmas"] = np.array(keywords["sigmas"])  # UniPC computes with the argument itself; the others also take a list.
        with np.errstate(all="ignore"):  # A value that becomes no number is refused below.
            set_timesteps(*arguments, **keywords)
        levels = torch.as_tensor(scheduler.sigmas)
        check(len(scheduler.timesteps) > 0 and bool(torch.isfinite(levels).all() and levels[:-1].diff().all()))

    @functools.wraps(step)
    def begun(*arguments: Any, **keywords: Any) -> Any:
        if getattr(scheduler, "begin_index", None) is None:  # Then the first step is looked up by its timestep: no two may be equal.
            check(len(scheduler.timesteps.unique()) == len(scheduler.timesteps))
        return step(*arguments, **keywords)

    scheduler.step, scheduler.set_timesteps = begun, checked
    return scheduler


def _plain_copy(scheduler: Any, memo: dict[int, Any]) -> Any:
    """A copy of the scheduler in its present state, which reports no step: pipelines use the copy for the sound of a film."""
    plain = copy.copy(scheduler)
    for name in ("step", "set_timesteps", "__deepcopy__"):
        vars(plain).pop(name, None)
    return copy.deepcopy(plain, memo)


def _fit_size(processor: Any, arguments: Mapping[str, Any]) -> Any:
    """The pipeline's processor of pictures. If the pipeline would draw in the size of the sent picture, a copy of it resizes the picture to
    the width and height in the call's `arguments`. A picture that the pipeline has changed is not resized."""
    preprocess, sides = processor.preprocess, {side: arguments[side] for side in ("width", "height") if side in arguments}
    if len(sides) < 2 or not sides.keys() <= inspect.signature(preprocess).parameters.keys():
        return processor
    resizer = copy.copy(processor)

    @functools.wraps(preprocess)
    def fitted(image: Any, *others: Any, **keywords: Any) -> Any:
        size = {} if others or image is not arguments.get("image") else sides
        return preprocess(image, *others, **{**size, **keywords})

    resizer.preprocess = fitted
    return resizer
