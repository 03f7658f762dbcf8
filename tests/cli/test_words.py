"""The command's own texts, and mistakes on the command line: one line, before any process is started and before torch is imported."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main
from typer.main import get_command
from typer.testing import CliRunner

from helpers import lengths
from helpers.bare import bare_environment, bare_python
from helpers.command import omnistage
from helpers.output import COMMAND, refusal
from helpers.processes import StartedProcess
from helpers.terminal import Terminal, words_of
from omnistage.cli.main import app
from omnistage.cli.show.commands import write_protos
from omnistage.client.private_stack import LAUNCHER_NEEDS
from omnistage.client.request import MAX_TEXT_CHARACTERS
from tools.protos import compile_protos


@pytest.mark.parametrize(
    ("words", "given", "told"),
    [
        (["ask", "-"], b"\xff", "the text is not UTF-8: byte 0 is 0xff"),
        (["ask", "-"], b"What is \xe9", "the text is not UTF-8: byte 8 is 0xe9"),
        (["say", b"caf\xe9"], b"", "the text is not UTF-8: byte 3 is 0xe9"),
        (["say", "-"], b"", "the text is empty"),
        (["ask", " \n"], b"", "the text is empty"),
        (["say", "-"], b"a" * (MAX_TEXT_CHARACTERS + 1), "the text is longer than 1048576 characters"),
        (["ask", "-"], "\N{GRINNING FACE}".encode() * (MAX_TEXT_CHARACTERS + 1), "the text is longer than 1048576 characters"),
        (["ask", "Hi", "--pipeline", "toy-picture"], b"", "toy-picture does not answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line_and_a_hint(words: list[str | bytes], given: bytes, told: str) -> None:
    model = [] if "--pipeline" in words else ["--pipeline", "toy"]
    error, hint = refusal(*words, *model, text=given)
    assert error.startswith("error: ") and told in error and hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--json-schema", "/no/such.json"), "--json-schema /no/such.json: No such file or directory"),
        (("--json-schema", "/dev/zero"), "--json-schema /dev/zero: this is more than 4 MiB, and no JSON schema"),
    ],
    ids=str,
)
def test_a_mistake_that_says_all_has_no_hint(words: tuple[str, ...], told: str) -> None:
    assert refusal("ask", "Hi", "--pipeline", "toy", *words) == [f"error: {told}"]


ONE_INPUT = "only one of TEXT, --image, --audio and --video can be -"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sing Hi", "No such command 'sing'"),
        ("ask", "give the words of the question, or what to ask about: --image, --audio, --video"),
        ("ask Hi --seed -1", "'--seed': is '-1'; it must be at least 0"),
        ("ask Hi --seed many", "'--seed': is 'many'; it must be a whole number"),
        ("ask Hi --out x.wav --text-only", "--out, --captions and --play need sound"),
        ("ask Hi --sample-rate 16000 --text-only", "are those of sound; leave --text-only out"),
        ("ask Hi --voice toy --text-only", "are those of sound; leave --text-only out"),
        ("ask Hi --encoding float32 --text-only", "are those of sound; leave --text-only out"),
        ("ask - --audio -", ONE_INPUT),
        ("ask Hi --audio - --image -", ONE_INPUT),
        ("ask --video-sound x", "give one with --video"),
        ("ask --background #ffffff x", "give one with --image or --video"),
        ("ask --background white --image cat.png x", "'white'; it must be a colour as #rrggbb, such as #ffffff for white"),
        ("say Hi --encoding mp3", "'mp3' is not one of 'pcm16', 'float32'"),
        ("say Hi --profile quick", "'quick' is not one of"),
        ("say Hi --max-frames 0", "'--max-frames': is '0'; it must be at least 1"),
        ("say Hi --text-only", "No such option: --text-only"),
        ("draw x --size 512", "--size 512: give width and height"),
        ("draw x --size 0x8", "--size 0x8: give width and height"),
        ("draw x --size 8x8 --width 8", "--size is both sides"),
        ("draw x --preview-dir .", "--preview-dir is for previews; say how many with --previews"),
        ("draw x --preview-side 64", "--preview-side is for previews; say how many with --previews"),
        ("draw x --step-cache 1.5", "'--step-cache': is '1.5'; it must be at most 1"),
        ("draw x --device cpu --address 127.0.0.1:1", "--device is for a stack that is started"),
        ("draw x --device nowhere=cpu", "--device nowhere=cpu"),
        ("draw - --image -", "only one of PROMPT, --image, --mask and --control can be -"),
        ("film x --codec mpeg2", "mpeg2"),
        ("film x --frames 0", "'--frames': is '0'; it must be at least 1"),
        ("film x --fps nan", "'--fps': is 'nan'; it must be at most 120"),
        ("film x --timeout inf", "'--timeout': is 'inf'; it must be a number"),
        ("film x --size 32x32 --width 32", "--size is both sides"),
        ("film x --background #ffffff", "--background is for pictures"),
        ("sound x --guidance nan", "is 'nan'; it must be"),
        ("sound x --out - --json", "--out - and --json both want standard output"),
        ("sound x --option eta", "give NAME=VALUE"),
        ("serve toy --device singer=cpu", "singer"),
        ("serve toy --colour red", "No such option: --colour"),
    ],
)
def test_a_wrong_command_line(line: str, told: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2 and "Usage" in result.output
    assert told in " ".join(result.output.replace("│", " ").split())


def test_standard_input_that_is_closed() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "ask", "-"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "error: - reads standard input, and there is none"


def test_standard_output_that_is_closed(toy_address: str, tmp_path) -> None:
    words = ("say", "one two", "--out", str(tmp_path / "x.wav"), "--address", toy_address)
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *COMMAND, *words], timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "x.wav").stat().st_size > 44


def test_a_reader_that_has_seen_enough(toy_address: str) -> None:
    text = " ".join(["words"] * 250)
    command = [*COMMAND, "say", text, "--address", toy_address]
    with StartedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as call:
        assert call.stdout is not None and call.stderr is not None
        call.stdout.read(1)
        call.stdout.close()
        said = call.stderr.read()
        assert call.wait(60) in (0, 141)  # 0: it had written all before the pipe broke
    assert "Traceback" not in said and "error" not in said


@lengths.drawn_cells(1, "size", [(80, 24), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
@lengths.drawn_cells(
    2,
    "words",
    [
        ["draw", "  "],
        ["ask", "Hi", "--pipeline", "toy-picture"],
        ["ask", "Hi", "--pipeline", "nobody-has-this"],
        ["ask", "Hi", "--choise", "yes"],
        ["draw", "a red heart", "--background", "#ffffff"],
        ["status"],
        ["say", "--help"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_lines_of_a_terminal_are_broken_between_words(words: list[str], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads them in a pipe gets them whole."""
    monkeypatch.setenv("OMNISTAGE_ROUTER", "none")
    piped = omnistage(*words)
    terminal = Terminal(*size)
    assert terminal.run(words) == piped.returncode
    said = words_of(terminal.lines)
    assert set(re.findall(r"\w+", piped.stderr)) <= set(re.findall(r"\w+", " ".join(said))), terminal.lines
    if "--help" in words:
        assert set(re.findall(r"[\w-]+", piped.stdout)) <= set(re.findall(r"[\w-]+", " ".join(said))), terminal.lines
        assert max(map(len, terminal.lines)) < size[0]


def test_no_option_takes_a_number_that_is_none(seed: int) -> None:
    """Each option of every command that takes a number is tried, bounded or not."""
    chance, options = random.Random(seed), 0
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        text = ["x"] if any(parameter.required for parameter in command.params) else []
        for option in (parameter.opts[0] for parameter in command.params if parameter.type_descriptor.annotation is float):
            options += 1
            value = chance.choice(["inf", "-inf", "nan", "1e400"])
            output = CliRunner().invoke(app, [name, f"{option}={value}", *text]).stderr
            assert f"'{option}'" in output and "it must be" in " ".join(output.split()), (name, option, value, output)
    assert options > 20


# Mistakes in what serve is told


WATCHED = """
import json, os, sys
started = []
sys.addaudithook(lambda event, arguments: started.append(str(arguments[1])) if event == "subprocess.Popen" else None)
import omnistage.cli.stack.serve
from omnistage.cli.main import app
for words in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with open(reading) as pipe:
            said = pipe.read()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]), flush=True)
        continue
    os.dup2(writing, 2)
    try:
        app(words, prog_name="omnistage")
    finally:
        print(json.dumps({"started": started, "torch": "torch" in sys.modules}), file=sys.stderr)
"""
"""Each command is forked by one Python that has imported what they need."""


def refusals(*commands: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """For each of these words of `serve` the one line that it ends with. The launcher has started nothing and not imported torch."""
    words = json.dumps([["serve", *map(str, command)] for command in commands])
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run([sys.executable, "-c", WATCHED, words], capture_output=True, text=True, timeout=100, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ended) == len(commands)
    for code, said in ended:
        assert code == 1, said
        line, watched = said.splitlines()
        assert json.loads(watched) == {"started": [], "torch": False}
        assert line.startswith("error: ")
        yield line.removeprefix("error: ")


ANYWHERE = ("--address", "127.0.0.1:0")
MISTAKES: Sequence[tuple[Sequence[str], str]] = [
    (["--address", "50051"], "--address: '50051' has no host: give HOST:PORT such as 127.0.0.1:50051"),
    (["--address", ":50051"], "--address: ':50051' has no host: give HOST:PORT such as 127.0.0.1:50051"),
    (["--address", "0.0.0.0:99999"], "--address: '0.0.0.0:99999' has no possible port"),
    (["--metrics-address", "http://127.0.0.1:9464"], "--metrics-address: 'http://127.0.0.1:9464' is a URL: leave http:// out"),
    (["--metrics", "9464"], "--metrics: '9464' has no host: give HOST:PORT such as 127.0.0.1:9464"),
    (["--metrics", "192.0.2.1:9464"], "cannot listen on 192.0.2.1:9464: 192.0.2.1 is not an address of this machine"),
    (["--address", "192.0.2.1:50050"], "cannot listen on 192.0.2.1:50050: 192.0.2.1 is not an address of this machine"),
    (["--device", "talker=cuda:0"], "device cuda:0: the talker of smol computes on cpu only"),
    (["--device", "gpu"], "--device: 'gpu' is no device: give cpu, cuda or cuda:N"),
    (["--dtype", "float64"], "--dtype: no stage of smol, picture computes in float64"),
    (["toy", "--dtype", "bfloat16"], "--dtype: no stage of toy computes in bfloat16"),
    (["--checkpoint", "/"], "/thinker/config.json is missing: give the whole folder of a checkpoint"),
    (["toy", "--checkpoint", "/"], "the models of toy have no weights"),
    (["smol", "--tensor-parallel-size", "2"], "--tensor-parallel-size 2: no stage of smol has a use for it"),
    (["--tensor-parallel-size", "talker=2"], "tensor_parallel_size 2: the talker of smol computes on one device; for more answers at once"),
    (["--max-batch-size", "code2wav=2"], "max_batch_size 2: the code2wav of smol computes one session after the other"),
    (["--max-batch-size", "many"], "--max-batch-size: is 'many'; it must be a whole number"),
    (["--max-batch-tokens", "-1"], "--max-batch-tokens: is '-1'; it must be at least 0"),
    (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: is '1.5'; it must be at most 1"),
    (["--enable-cache", "perhaps"], "--enable-cache: is 'perhaps'; it must be true or false"),
    (["toy", "--kv-cache-bytes", "65536"], "--kv-cache-bytes 65536: no stage of toy has a use for it"),
    (["toy", "--threads", "2"], "--threads 2: no stage of toy has a use for it"),
    (["toy", "--log-dir", "/dev/null/logs"], "--log-dir /dev/null/logs: Not a directory"),
]


def test_a_mistake_is_told_in_one_line() -> None:
    told = refusals(*([*words, *([] if "--address" in words else ANYWHERE)] for words, _ in MISTAKES))
    wrong = {" ".join(words): line for (words, expected), line in zip(MISTAKES, told, strict=True) if expected not in line}
    assert wrong == {}


def test_a_bad_variable_of_the_environment_is_named() -> None:
    (told,) = refusals(ANYWHERE, environment={"OMNISTAGE_LOG_LEVEL": "loud"})
    assert told == "OMNISTAGE_LOG_LEVEL: is 'loud'; it must be 'debug', 'info', 'warning' or 'error'"


def test_two_servers_on_one_port(free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    of_router, of_launcher = ["--address", address, "--metrics-address", address], ["--metrics-address", address, "--metrics", address]
    router, metrics = refusals(of_router, [*ANYWHERE, *of_launcher])
    assert router.startswith(f"--metrics-address: {address} is the --address too")
    assert metrics.startswith(f"--metrics: {address} is the --metrics-address too")


def test_an_unknown_family_in_a_pipeline_file(tmp_path: Path) -> None:
    unknown, speedy = tmp_path / "unknown.yaml", tmp_path / "speedy.yaml"
    unknown.write_text("name: own\ndescription: x\ninputs: [text]\noutputs: [text]\nstages:\n  - {kind: thinker, family: smoll}\n")
    speedy.write_text(unknown.read_text().replace("smoll", "toy, options: {speed: 3}"))
    family, options = refusals([unknown, *ANYWHERE], [speedy, *ANYWHERE])
    assert family.startswith("no thinker named 'smoll'; there are qwen2_5_omni, qwen3_omni, smol, toy")
    assert "unknown options ['speed'] of the toy models" in options


# Help, version, completion, the contract as files


COMMANDS = [name for name, command in typer.main.get_command(app).commands.items() if not command.hidden]  # type: ignore[attr-defined]


def shown(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run in a terminal of 80 columns."""
    return omnistage(*words, variables={"COLUMNS": "80", **variables})


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_that_of_the_package(option: str) -> None:
    told = shown(option)
    assert (told.returncode, told.stdout, told.stderr) == (0, f"omnistage {version('omnistage')}\n", "")


@pytest.mark.parametrize(
    ("words", "unneeded"), [("--version", "typer rich numpy grpc"), ("ask --help", "numpy grpc torch")], ids=["version", "help"]
)
def test_what_only_tells_imports_little(words: str, unneeded: str) -> None:
    """So that who asks for it does not wait."""
    code = (
        f"import sys; sys.argv = ['omnistage', *{words.split()}]\nfrom omnistage.cli.__main__ import main\n"
        f"try:\n    main()\nfinally:\n    assert not {set(unneeded.split())} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_help_has_examples_and_fits_a_terminal(name: str) -> None:
    done = shown(*name.split(), "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search(r"\w\.{3}|…", done.stdout), "a sentence is cut"
    assert not re.search(r"<(?!-)[a-z_]+[ \[\]a-z]*>", done.stdout), "a type of Python's is no word for what can be typed"
    examples = [line.strip() for line in lines[lines.index("  Examples:") + 1 :] if line.strip()]
    assert any(line.startswith((f"omnistage {name}", f"watch omnistage {name}")) for line in examples), examples
    assert "OMNISTAGE_SERVE_ADDRESS" in done.stdout or name != "serve"


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_the_examples_exist(name: str) -> None:
    """An example is the first thing that is copied."""
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    there = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for line in command.epilog.splitlines():
        words = line.split("|")[0].split()
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= there, (line, used - there)


@pytest.mark.parametrize(("typed", "offered"), [("st", {"status", "stop"}), ("serve --det", {"--detach"})])
def test_a_shell_completes(typed: str, offered: set[str]) -> None:
    words = f"omnistage {typed}"
    done = shown(_OMNISTAGE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert set(done.stdout.split()) == offered


def test_completion_can_be_shown_for_a_shell() -> None:
    done = shown("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _omnistage_completion omnistage" in done.stdout


def test_one_name_of_the_option_is_shown_and_both_work() -> None:
    for name in ("ask", "draw"):
        (line,) = (line for line in shown(name, "--help").stdout.splitlines() if "--model" in line)
        assert "--pipeline" in line, "--model stands beside --pipeline, as its other name, alone"


# The contract as files


PROTOS = Path(__file__).resolve().parents[2] / "protos"
ERROR_FILES = {"google/rpc/status.proto", "google/rpc/error_details.proto"}


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.proto")}


def compiled(folder: Path, out: Path) -> set[str]:
    """The names in protoc's output for all files in the folder, as Python."""
    out.mkdir()
    compile_protos([f"-I{folder}", f"--python_out={out}", f"--grpc_python_out={out}", *contents(folder)])
    return {path.relative_to(out).as_posix() for path in out.rglob("*_pb2.py")}


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    program = "import typer; from omnistage.cli.show.commands import protos; typer.run(protos)"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)


def test_the_command_names_what_it_wrote(tmp_path: Path) -> None:
    done = typed(str(tmp_path / "protos"), "--errors")
    assert (done.returncode, done.stderr) == (0, "")
    names = {Path(line).relative_to(tmp_path / "protos").as_posix() for line in done.stdout.splitlines()}
    assert names == {*contents(PROTOS), *ERROR_FILES}


def test_the_command_says_that_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = typed(str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no folder" in done.stderr and "hint: Give a folder" in done.stderr


@pytest.mark.parametrize("errors", [False, True])
def test_protoc_takes_what_it_wrote(tmp_path: Path, errors: bool) -> None:
    write_protos(tmp_path / "protos", errors=errors)
    names = set(contents(PROTOS)) | (ERROR_FILES if errors else set())
    assert compiled(tmp_path / "protos", tmp_path / "out") == {name.replace(".proto", "_pb2.py") for name in names}


def test_files_of_an_earlier_version_are_replaced_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "protos"
    files = write_protos(folder)
    assert {path.relative_to(folder).as_posix() for path in files} == set(contents(PROTOS)) and len(files) == 6
    (folder / "omnistage" / "v1" / "omni.proto").write_text("old")
    (folder / "mine.proto").write_text("mine")
    write_protos(folder)
    assert contents(folder) == {**contents(PROTOS), "mine.proto": "mine"}


# Without the extras


INSTALL = "`make wheels` in a clone, then pip install --find-links dist 'omnistage[cli,convert,models]'"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return bare_environment(tmp_path_factory.mktemp("bare"))


def python(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*bare_python(), *words], env=environment, capture_output=True, text=True, timeout=60)


def test_the_command_says_what_to_install(bare: dict[str, str]) -> None:
    for words in (("ask", "Hi"), ("--help",), ()):
        done = python(bare, "-m", "omnistage.cli", *words)
        assert (done.returncode, done.stdout) == (1, "")
        error, hint = done.stderr.splitlines()
        assert error.startswith("error: ") and "typer" in error and INSTALL in hint


def test_a_private_stack_says_what_to_install(bare: dict[str, str]) -> None:
    code = "try:\n    Omni()\nexcept StackError as error:\n    print(error, error.hint, sep='\\n')"
    done = python(bare, "-c", f"from omnistage.client import Omni, StackError\n{code}")
    assert (done.returncode, done.stderr) == (0, "")
    error, hint = done.stdout.splitlines()
    assert error.endswith(f"{INSTALL}") and "address='HOST:PORT'" in hint
    assert [name for name in LAUNCHER_NEEDS if name in error + hint] == [], "names of modules help nobody who types them to pip"


def test_the_client_asks_a_router_that_runs(bare: dict[str, str], toy_address: str) -> None:
    code = "import sys\nfrom omnistage.client import Omni\nwith Omni(address=sys.argv[1]) as omni:\n    print(omni.say('one two').text)"
    done = python(bare, "-c", code, toy_address)
    assert (done.returncode, done.stdout.split()) == (0, ["one", "two"]), done.stderr


def test_the_default_model_says_what_to_install(tmp_path: Path) -> None:
    done = python(bare_environment(tmp_path, "cli"), "-m", "omnistage.cli", "ask", "Hi")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: the models of smol need packages that are not installed: torch")
    assert done.returncode == 1 and INSTALL in hint
