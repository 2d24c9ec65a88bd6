"""Commands that start vLLM, read as people write them."""

import shlex
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diag.commands.lint import judge
from diag.core.errors import BadUsage
from diag.vllm.command import branches
from diag.vllm.command.command import Command
from diag.vllm.command.parse import MOST_BYTES, read
from diag.vllm.command.shell import Bare, statements
from diag.vllm.flags.registry import known


def flags(command: Command) -> dict[str, tuple[str, ...]]:
    return {each.name: each.values for each in command.given}


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/m --max-num-seqs 8",
        "vllm serve org/m --max_num_seqs=8",
        "/opt/venv/bin/vllm serve org/m --max-num-seqs 8",
        "vllm serve --max-num-seqs 8 org/m",
        "vllm serve 'org/m' \"--max-num-seqs\" '8'",
        "vllm serve \\\n  org/m \\\n  --max-num-seqs 8",
        "python -m vllm.entrypoints.openai.api_server --model org/m --max-num-seqs 8",
        "python3 -u /app/vllm/entrypoints/openai/api_server.py --model org/m --max-num-seqs 8",
        "python -m vllm.entrypoints.cli.main serve org/m --max-num-seqs 8",
        "--model org/m --max-num-seqs 8",
        "sudo -E env A=1 vllm serve org/m --max-num-seqs 8 > log 2>&1 &",
        "nohup vllm serve org/m --max-num-seqs 8 | tee log",
        "cd /srv && exec vllm serve org/m --max-num-seqs 8",
        "sh -c 'vllm serve org/m --max-num-seqs 8'",
        "ssh gpu1 'cd /srv; vllm serve org/m --max-num-seqs 8'",
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.10.0 --model org/m --max-num-seqs 8",
        "docker run -v /data/vllm:/data --name vllm-1 --rm -it vllm/vllm-openai --model org/m --max-num-seqs 8",
        "docker run --rm example/image python3 -m vllm.entrypoints.openai.api_server --model org/m --max-num-seqs 8",
        "podman run ghcr.io/x/my-vllm:1 serve org/m --max-num-seqs 8",
        "docker run vllm/vllm-openai vllm serve org/m --max-num-seqs 8",
        "docker run -e A=1 vllm/vllm-openai bash -c 'vllm serve org/m --max-num-seqs 8'",
        "#!/bin/bash\nset -e\n# vllm serve other\nMODEL=org/m\nSEQS=8\nvllm serve $MODEL --max-num-seqs ${SEQS}\n",
        'CMD=(\n  vllm serve org/m  # the model\n  --max-num-seqs 8\n)\n"${CMD[@]}"\n',
        "if true; then\n  $VLLM serve org/m --max-num-seqs 8 # now\nfi",
        "# don't forget the venv\nvllm serve org/m --max-num-seqs 8 # Bob's\n# that's all",
        'echo "Starting vllm serve on port 8000 ..."\nvllm serve org/m --max-num-seqs 8',
        "echo starting vllm serve now\nvllm serve org/m --max-num-seqs 8",
        "pkill -f 'vllm serve' || true; vllm serve org/m --max-num-seqs 8",
        "bash -c 'echo vllm serve it'; vllm serve org/m --max-num-seqs 8",
        "(cd /srv && vllm serve org/m --max-num-seqs 8)",
        "( A=1 vllm serve org/m --max-num-seqs 8 ) &",
        "{ vllm serve org/m --max-num-seqs 8; }",
        "vllm serve org/m --max-num-seqs 8 > >(tee out.log) 2> >(tee err.log >&2)",
        "vllm serve org/m --max-num-seqs 8 &>> log",
        "ARGS='--model org/m --max-num-seqs 8'\npython -m vllm.entrypoints.openai.api_server $ARGS",
        "ARGS=(--max-num-seqs)\nARGS+=(8 # as many\n)\nvllm serve org/m ${ARGS[@]}",
        "PID=$(vllm serve org/m --max-num-seqs 8 > /tmp/v.log 2>&1 & echo $!)",
        'tmux new -d "vllm serve org/m \\\n --max-num-seqs 8 2>&1 | tee \\$HOME/x"',
        "IMAGE=vllm/vllm-openai:v0.9.1\ndocker run $IMAGE --model org/m --max-num-seqs 8",
        'IMAGE="${IMAGE:-vllm/vllm-openai:v0.9.1}"\ndocker run "$IMAGE" --model org/m --max-num-seqs 8',
        "cat <<EOF > x\nit's a template\nvllm serve other\nEOF\nvllm serve org/m --max-num-seqs 8",
        "cat > x <<'EOF'\ndon't\nEOF\nvllm serve org/m --max-num-seqs 8",
        "cat <<-END | tee x\n\tIt's\n\tEND\nvllm serve org/m --max-num-seqs 8",
        "ssh gpu1 <<EOF\ncd /srv\nvllm serve org/m --max-num-seqs 8\nEOF",
        'tee x <<< "it\'s"; vllm serve org/m --max-num-seqs 8',
        "kubectl run vllm --image=vllm/vllm-openai:v0.8.5 --restart=Never -- --model org/m --max-num-seqs 8",
        "docker run --entrypoint vllm vllm/vllm-openai serve org/m --max-num-seqs 8",
        "docker run --entrypoint sh vllm/vllm-openai -c 'vllm serve org/m --max-num-seqs 8'",
        "apptainer run --nv docker://vllm/vllm-openai:v0.9.1 --model org/m --max-num-seqs 8",
    ],
)
def test_every_spelling_of_a_command_is_parsed_the_same(text: str) -> None:
    command = read(text)
    assert command.model == "org/m"
    assert command.get("--max-num-seqs") == "8"
    assert not command.strays


def test_environment_comes_from_the_command_and_its_script() -> None:
    text = "export A=1\nB='2 3' C=4 docker run -e D=5 --env=E=6 -eF=7 vllm/vllm-openai bash -c 'G=8 vllm serve m'"
    assert read(text).environment == {"A": "1", "B": "2 3", "C": "4", "D": "5", "E": "6", "F": "7", "G": "8"}


@pytest.mark.parametrize(
    "options", ["", "-v /data/vllm:/data", "--name vllm-1", "--rm -it", "-e A=vllm", "--ipc=host", "-itd --privileged"]
)
def test_image_is_distinguished_from_the_options_before_it(options: str) -> None:
    command = read(f"docker run {options} vllm/vllm-openai:v0.9.2 --model m")
    assert command.image == "vllm/vllm-openai:v0.9.2"
    assert [each.name for each in command.given] == ["--model"]


def test_variables_of_another_shell_stay_unchanged() -> None:
    command = read('A=$B\nvllm serve "$MODEL" --port ${PORT:-8000} --max-num-seqs $A')
    assert command.model == "$MODEL"
    assert flags(command) == {"--port": ("${PORT:-8000}",), "--max-num-seqs": ("$A",)}


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("$((8000 + i))", "$((8000 + i))"),
        ("${EXTRA:---enforce-eager --port 1}", "${EXTRA:---enforce-eager --port 1}"),
        ('"$(nvidia-smi -L | wc -l)"', "$(nvidia-smi -L | wc -l)"),
        ('"$(echo "a b" `date`)"', '$(echo "a b" `date`)'),
        ("a\\ b'c d'\"e \\$f\"", "a bc de $f"),
        ("a#b", "a#b"),
        ('x"y"$Z', "xy$Z"),
    ],
)
def test_words_are_split_as_in_a_shell(word: str, text: str) -> None:
    command = read(f"vllm serve m --port {word} --seed 1")
    assert flags(command) == {"--port": (text,), "--seed": ("1",)}
    bare = command.words[4]
    assert isinstance(bare, Bare) is (word[0] not in '"a')
    assert getattr(bare, "raw", word) == word


def test_unit_file_has_only_its_named_variables() -> None:
    text = '[Service]\nEnvironment="A=1,2"\nEnvironment=B=3 C=4\nExecStart=/opt/vllm/bin/vllm serve m'
    assert read(text).environment == {"A": "1,2", "B": "3", "C": "4"}


@pytest.mark.parametrize(
    ("text", "entry", "elsewhere"),
    [
        ("vllm serve m", None, ""),
        ("uv run vllm serve m", None, ""),
        ("docker run vllm/vllm-openai --model m", 3, "in the container"),
        ("docker run vllm/vllm-openai vllm serve m", 3, "in the container"),
        ("docker run --entrypoint vllm vllm/vllm-openai serve m", None, "in the container"),
        ("kubectl exec -it pod -- vllm serve m", None, "in the container"),
        ("docker exec -d c bash -c 'vllm serve m'", None, "in the container"),
        ("ssh gpu1 'vllm serve m'", None, "on another host"),
    ],
)
def test_parsed_command_has_positions_of_words_and_folders(text: str, entry: int | None, elsewhere: str) -> None:
    command = read(text)
    assert (command.entry, command.elsewhere) == (entry, elsewhere)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--served-model-name a b --port 1", {"--served-model-name": ("a", "b"), "--port": ("1",)}),
        ("--seed -1", {"--seed": ("-1",)}),
        ("--watermark -.5", {"--watermark": ("-.5",)}),
        ("-tp 2 -pp=3", {"--tensor-parallel-size": ("2",), "--pipeline-parallel-size": ("3",)}),
        ("-O3", {"--optimization-level": ("3",)}),
        ("-O 2", {"--optimization-level": ("2",)}),
        ("""-cc '{"a": "b c"}'""", {"--compilation-config": ('{"a": "b c"}',)}),
        ("--hf-token --port 1", {"--hf-token": (), "--port": ("1",)}),
        ("--enforce-eager --port 1", {"--enforce-eager": (), "--port": ("1",)}),
        ("--max-model-len --port 1", {"--max-model-len": (), "--port": ("1",)}),
        ("--never-heard-of 5 --port 1", {"--never-heard-of": ("5",), "--port": ("1",)}),
        ("--port=", {"--port": ("",)}),
    ],
)
def test_a_flag_takes_the_words_that_are_its_values(words: str, expected: dict[str, tuple[str, ...]]) -> None:
    assert flags(read(f"vllm serve m {words}", version="0.32.0")) == expected


def test_the_words_of_a_flag_are_where_it_stands() -> None:
    command = read("A=1 vllm serve m --port=1 --served-model-name a b")
    assert [command.words[each.words.start : each.words.stop] for each in command.given] == [
        ("--port=1",),
        ("--served-model-name", "a", "b"),
    ]


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("", None),
        ("--enable-prefix-caching", True),
        ("--no-enable-prefix-caching", False),
        ("--enable-prefix-caching --no-enable-prefix-caching", False),
        ("--enable-chunked-prefill False --enable-prefix-caching=False", False),
    ],
)
def test_switch_is_on_off_or_unset(words: str, on: bool | None) -> None:
    assert read(f"vllm serve m {words}").switched("--enable-prefix-caching") is on


def test_a_word_after_a_switch_is_no_model() -> None:
    command = read("python -m vllm.entrypoints.openai.api_server --enable-chunked-prefill False --model m")
    assert (command.model, command.strays) == ("m", ())


def test_surplus_words_are_strays() -> None:
    command = read("vllm serve m --port 1 extra '--dtype auto'")
    assert [command.words[at] for at in command.strays] == ["extra", "--dtype auto"]


def test_a_second_model_is_a_stray() -> None:
    command = read("vllm serve m --model n")
    assert (command.model, command.strays) == ("n", (2,))


def test_the_name_of_a_pod_is_no_image_and_a_keyword_no_word() -> None:
    command = read("if true; then kubectl run vllm --image=vllm/vllm-openai:v0.8.5 --restart=Never -- --model m; fi")
    assert (command.words[0], command.image) == ("kubectl", "vllm/vllm-openai:v0.8.5")
    assert [*flags(command)] == ["--model"]


def test_arrays_of_arrays_stay_small() -> None:
    twice = "".join(f'A{at + 1}=("${{A{at}[@]}}" "${{A{at}[@]}}")\n' for at in range(30))
    assert len(read(f'A0=(x)\n{twice}vllm serve m "${{A30[@]}}"').words) < 2000


def test_servers_after_the_first_are_counted() -> None:
    assert read("vllm serve a --port 1 &\nvllm serve b --port 2 &\nvllm serve c\nvllm bench serve").more == 2


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_yaml_config_gives_flags_that_the_command_line_overrides(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: org/m\nmax-num-seqs: 8\nenforce_eager: true\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\ncompilation-config: {cudagraph_mode: NONE}\nport: 1\n"
    )
    command = read("vllm serve --config c.yaml --port 2", tmp_path)
    assert command.model == "org/m"
    assert command.get("--max-num-seqs") == "8"
    assert command.switched("--enforce-eager") is True
    assert command.switched("--enable-prefix-caching") is False
    assert command.all("--served-model-name")[0].values == ("a", "b")
    assert command.get("--compilation-config") == '{"cudagraph_mode": "NONE"}'
    assert command.get("--port") == "2"
    assert [each.words for each in command.all("--port")] == [range(0), range(4, 6)]


@pytest.mark.parametrize(
    ("version", "key", "dropped"),
    [
        ("0.8.5", "enable-prefix-caching", False),
        ("0.27.1", "enable-prefix-caching", True),
        ("0.27.1", "enable_prefix_caching", True),
        ("0.32.0", "enable-prefix-caching", False),
        ("0.32.0", "enable_prefix_caching", True),
    ],
)
def test_false_that_vllm_ignores_counts_as_unset(version: str, key: str, dropped: bool, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"{key}: false\n")
    command = read("vllm serve m --config c.yaml", tmp_path, version)
    assert command.dropped == ((key,) if dropped else ())
    assert command.switched("--enable-prefix-caching") is (None if dropped else False)


def test_a_config_of_another_machine_is_not_looked_for_here(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("port: 1\n")
    assert read("docker run vllm/vllm-openai --model m --config c.yaml", tmp_path).get("--port") is None


def test_the_model_of_the_command_line_counts_more_than_that_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: org/m\n")
    assert read("vllm serve mine --config c.yaml", tmp_path).model == "mine"


def test_a_script_and_a_config_are_read_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\nvllm serve org/m \\\n --port 1\n")
    (tmp_path / "c.yaml").write_text("model: org/m\nport: 1\n")
    for name in ("run.sh", "c.yaml"):
        command = read(str(tmp_path / name))
        assert (command.model, command.get("--port")) == ("org/m", "1")


COMPOSE = """
services:
  db: {image: postgres:15}
  llm:
    image: vllm/vllm-openai:v0.9.2
    environment: {VLLM_USE_V1: 0}
    command: >
      --model org/m
      --port 1
"""
KUBERNETES = """
apiVersion: v1
kind: Service
---
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.9.2
          command: [COMMAND]
          args: [ARGS]
          env:
            - {name: VLLM_USE_V1, value: "0"}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}
"""


@pytest.mark.parametrize(
    "text",
    [
        COMPOSE,
        KUBERNETES.replace("[COMMAND]", "[vllm, serve]").replace("[ARGS]", "[org/m, --port, '1']"),
        KUBERNETES.replace("[COMMAND]", "[]").replace("[ARGS]", "['--model=org/m', '--port=1']"),
        KUBERNETES.replace("[COMMAND]", "[python3, -m, vllm.entrypoints.openai.api_server]").replace(
            "[ARGS]", "[--model, org/m, --port, 1]"
        ),
        KUBERNETES.replace("[COMMAND]", "[/bin/sh, -c]").replace("[ARGS]", "['vllm serve org/m --port 1']"),
    ],
    ids=["compose", "vllm serve", "image", "module", "shell"],
)
def test_a_manifest_holds_the_command_of_a_container(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(text)
    command = read(str(tmp_path / "m.yaml"))
    assert (command.model, command.get("--port")) == ("org/m", "1")
    assert command.image == "vllm/vllm-openai:v0.9.2"
    of_a_secret = {"HF_TOKEN": "${HF_TOKEN}"} if "secretKeyRef" in text else {}
    assert command.environment == {"VLLM_USE_V1": "0", **of_a_secret}


def test_a_container_that_runs_another_program_is_no_server(tmp_path: Path) -> None:
    pod = KUBERNETES.replace("[COMMAND]", "[python3, -c, 'import vllm']").replace("[ARGS]", "[]")
    server = KUBERNETES.replace("[COMMAND]", "[]").replace("[ARGS]", "[--model, org/m]")
    (tmp_path / "m.yaml").write_text(f"{pod}---{server}")
    command = read(str(tmp_path / "m.yaml"))
    assert (command.model, command.more) == ("org/m", 0)


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nkind: ConfigMap\nport: 1\nmodel: m\nseed: 1\n",
        "services: {db: {image: postgres}}\nport: 1\nmodel: m\n",
        "image: {repository: vllm/vllm-openai}\nreplicaCount: 1\nport: 1\n",
    ],
)
def test_a_manifest_without_a_server_is_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(BadUsage, match=r"\A[^\n]* has no container that starts vLLM[^\n]*\Z"):
        read(str(tmp_path / "m.yaml"))


def test_the_list_items_of_a_manifest_are_words_as_they_stand(tmp_path: Path) -> None:
    text = KUBERNETES.replace("[COMMAND]", "[]").replace("[ARGS]", "[serve, org/m, '--dtype auto']")
    (tmp_path / "m.yaml").write_text(text)
    command = read(str(tmp_path / "m.yaml"))
    assert [command.words[at] for at in command.strays] == ["--dtype auto"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no command that starts a vLLM server"),
        ("   \n", "no command that starts a vLLM server"),
        ("ls -l", "no command that starts a vLLM server"),
        ("vllm bench serve", "no command that starts a vLLM server"),
        ("docker run postgres:15 --port 1", "no command that starts a vLLM server"),
        ("vllm serve 'm", "an unclosed quotation mark"),
        ("vllm serve $(m", "an unclosed quotation mark"),
        ("PID=`vllm serve m > log & echo $!`", "no command that starts a vLLM server"),
        ("bash -c 'echo vllm serve m'", "no command that starts a vLLM server"),
        ('echo "PID=$(vllm serve m & echo $!)"', "no command that starts a vLLM server"),
        ("docker run --entrypoint python3 vllm/vllm-openai x.py", "no command that starts a vLLM server"),
        ("docker run --entrypoint python3 vllm/vllm-openai serve m", "no command that starts a vLLM server"),
        ("vllm serve m --config nowhere.yaml", "--config nowhere.yaml cannot be read: No such file"),
        ("x" * 5000, "no command that starts a vLLM server"),
        ("\0", "no command that starts a vLLM server"),
    ],
)
def test_text_without_a_command_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(BadUsage, match=r"\A[^\n]*\Z") as error:
        read(text)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.yaml", b"a: [1", ": this is no YAML"),
        ("c.yaml", b"- 1\n- 2\n", "holds no flags"),
        ("c.yaml", b"", "holds no flags"),
        ("c.yaml", b"\xff\xfe\x00", "is not a text file with a command"),
        ("run.sh", b"\x7fELF\0\0", "is not a text file with a command"),
        ("run.sh", b"x" * (MOST_BYTES + 1), "it is larger than 1 MiB"),
        ("run.sh", b"echo hello\n", "no command that starts a vLLM server"),
    ],
)
def test_a_file_that_holds_no_command_is_refused_in_one_sentence(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(BadUsage, match=r"\A[^\n]*\Z") as error:
        read(str(file))
    assert said in str(error.value)


@settings(max_examples=300)
@given(st.text(max_size=80))
def test_any_text_yields_a_command_or_one_sentence(text: str) -> None:
    for each in (text, f"vllm serve {text}"):
        try:
            assert isinstance(read(each), Command)
        except BadUsage as error:
            assert str(error)


SHELL = st.text(string.ascii_letters + "-=_.{}[]\"' /:#*$`\\;&|", min_size=1, max_size=12)


@settings(max_examples=300)
@given(st.lists(SHELL, max_size=6))
def test_any_script_yields_a_command_or_one_sentence(words: list[str]) -> None:
    try:
        assert isinstance(read(" ".join(["vllm serve", *words])), Command)
    except BadUsage as error:
        assert str(error)


NAMES = [each for each in known() if each not in ("--config", "--model")]
PLAIN = st.text(string.ascii_letters + string.digits + "/._:{}\" '", min_size=1, max_size=8).filter(
    lambda text: text.strip() and not text.startswith("-")
)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(NAMES), PLAIN), max_size=5), PLAIN)
def test_words_that_were_quoted_come_back_as_they_were(options: list[tuple[str, str]], model: str) -> None:
    words = ["vllm", "serve", model, *(word for name, value in options for word in (f"{name}={value}",))]
    command = read(shlex.join(words))
    assert list(command.words) == words
    assert command.model == model
    assert [(each.option.flag.name if each.option else "", each.values) for each in command.given] == [
        (name, (value,)) for name, value in options
    ]


@pytest.mark.parametrize(
    "text",
    [
        "ssh h 'vllm serve m --config FILE'",
        "ssh h <<EOF\nvllm serve m --config FILE\nEOF",
        "cat <<EOF | kubectl exec -i pod -- sh\nvllm serve m --config FILE\nEOF",
        "kubectl exec pod -- sh -c 'vllm serve m --config FILE'",
        "docker run vllm/vllm-openai sh -c 'vllm serve m --config FILE'",
        "docker exec c bash -lc 'cd /x; vllm serve m --config=FILE'",
        "srun -N 1 bash -c 'vllm serve m --config FILE'",
        "ssh h \"sh -c 'vllm serve m --config FILE'\"",
        KUBERNETES.replace("[COMMAND]", "[sh, -c]").replace("[ARGS]", "['vllm serve m --config FILE']"),
    ],
)
def test_nothing_is_opened_for_a_command_that_runs_elsewhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("max-num-seqs: 7\n")
    (tmp_path / "m.yaml").write_text(text.replace("FILE", str(tmp_path / "c.yaml")))
    is_manifest = text == text.lstrip() and "apiVersion" not in text
    command = read((tmp_path / "m.yaml").read_text() if is_manifest else str(tmp_path / "m.yaml"))
    assert command.elsewhere
    assert command.config == str(tmp_path / "c.yaml")
    assert command.get("--max-num-seqs") is None


@pytest.mark.parametrize("content", ["root: hunter2\nother: hunter2\n", "root:hunter2:1\n", "- hunter2\n"])
def test_contents_of_a_file_that_is_no_configuration_are_not_shown(content: str, tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text(content)
    with pytest.raises(BadUsage, match="holds no flags") as error:
        read("vllm serve m --config shadow", tmp_path)
    assert "hunter2" not in str(error.value)


def test_a_text_of_unknown_options_is_refused_before_each_is_looked_up() -> None:
    with pytest.raises(BadUsage, match="more than 100 options of the command are none of vLLM's"):
        read("vllm serve m " + " ".join(f"--unknown{number} 1" for number in range(4_000)))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ('[ -n "$A" ]', True),
        ('[ -z "$A" ]', False),
        ('[ -z "$E" ]', True),
        ('[ -n "$E" ]', False),
        ("[ -n $E ]", True),  # -n alone is a word
        ("[[ -n $E ]]", False),
        ("[ $E ]", False),
        ("[[ $A ]]", True),
        ('[ "$A" = "a*" ]', False),
        ("[[ $A == a* ]]", True),
        ("[ $N -gt 3 ]", False),
        ("[ $N -ge 3 ]", True),
        ('! [ -n "$U" ]', None),
        ('[ ! -n "$U" ]', None),
        ('[ ! -z "$A" ]', True),
        ("[[ ! -n $A || -n $A ]]", True),
        ('[ -n "$A" -o -n "$U" ]', True),
        ('[ -n "$E" -a -n "$U" ]', False),
        ("[[ -n $A && -n $U ]]", None),
        ("[[ -n $E && -n $E || -n $A ]]", True),
        ("[[ -n $A || -n $A && -n $E ]]", True),
        ("[[ -n $E && ( -z $E || -z $E || -n $A ) ]]", None),
        ('[ -d "$H" ]', False),
        ("[ -d /m ]", None),
        ('[ -f "$E" ]', False),
        ('[ "${A^^}" = A ]', True),
        ('[ "${B,,}" = b ]', True),
        ('[ "${E:-x}" = x ]', True),
        ('[ "${E:-$A}" = a ]', True),
        ("! false", True),
        ("[[ " + "! " * 20_000 + "-n $A ]]", True),
        ("[[ " + "-n $A && " * 20_000 + "-n $E ]]", False),
    ],
)
def test_a_test_of_a_script_holds_or_is_unknown(text: str, holds: bool | None) -> None:
    values = {"A": "a", "B": "B", "E": "", "H": "org/m", "N": "3", "U": None}
    words = next(step.words for step in statements(f"if {text}; then :; fi") if step.decides)
    assert branches.test(words, values) is holds


@pytest.mark.parametrize(
    ("text", "usual", "others"),
    [
        ("M=org/m\nif [ -d $M ]; then D=half; else D=auto; fi", "auto org/m", "half org/m"),
        ("M=org/m\nif [ $M = x ]; then D=half; else D=auto; fi", "auto org/m", "half $M"),
        ('f() {\nif [ -n "$1" ]; then D=half; else D=auto; fi\n}\nf x', "half $M", "auto $M"),
        ("if [ -d /x ]; then D=half; elif [ 1 = 1 ]; then D=auto; else D=auto; fi", "half $M", "auto $M"),
        ('if [ -n "$E" ] || [ -d /x ]; then D=half; else D=auto; fi', "half $M", "auto $M"),
        ('if [ -n "$E" ] && [ 1 = 1 ]; then D=half; else D=auto; fi', "auto $M", "half $M"),
        ("if [ 1 = 2 ] && [ -d /x ]; then D=half; else D=auto; fi", "auto $M", "half $M"),
        ('if [ -n "$X" ]; then D=half; else echo usage; exit 1; fi', "half $M", "None $M"),
        ('for X in a; do if [ -n "$X" ]; then D=half; else D=auto; fi; done', "half $M", "auto $M"),
        ('if [ -d /x ]; then X=a; fi\nif [ -z "$X" ]; then D=half; else D=auto; fi', "half $M", "auto $M"),
        ('X=b true\nif [ -n "$X" ]; then D=half; else D=auto; fi', "auto $M", "half $M"),
        (': "${X:=b}"\nif [ "$X" != b ]; then D=half; else D=auto; fi', "auto $M", "half $M"),
    ],
)
def test_the_usual_way_through_a_script_is_its_first_command(text: str, usual: str, others: str) -> None:
    server = read(f'{text}\nvllm serve "$M" --dtype "$D"')
    ways = [f"{way.get('--dtype')} {way.model}".replace("$D", "None") for way in (server, *server.branches)]
    assert (ways[0], {*ways[1:]} - {ways[0]}) == (usual, {others})


def test_a_script_with_more_ways_than_are_read_says_so() -> None:
    def script(arms: int) -> str:
        return "case $1 in\n" + "".join(f"m{at}) M=m{at};;\n" for at in range(arms)) + "esac\nvllm serve $M\n"

    assert not read(script(7)).is_cut
    told = [judge(script(arms)).not_checked for arms in (7, 40)]
    assert ["some branches of the script, which has more than are read" in notes for notes in told] == [False, True]


def test_a_script_within_a_command_has_the_variables_around_it() -> None:
    inner = 'if [ "$X" != b ]; then D=half; else D=auto; fi; vllm serve m --dtype $D'
    assert read(f"X=b\nbash -c '{inner}'").get("--dtype") == "auto"
    doubled = "A0=aaaaaaaaaa\n" + "".join(f'A{at}="{f"$A{at - 1}" * 4}"\n' for at in range(1, 40))
    assert read(f'{doubled}if [ -n "$A39" ]; then D=half; fi\nvllm serve m --dtype "$D"').get("--dtype") == "half"
