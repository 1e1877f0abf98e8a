"""The scripts behind `make`: what can be checked of them without installing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import bootstrap
import install_size
import pytest
import tiny_model as tiny
import vllm_env as environment

ROOT = Path(__file__).resolve().parent.parent


# --- bootstrap ------------------------------------------------------------------------------------


def test_pip_settings_become_uv_flags(tmp_path: Path) -> None:
    flags, variables = bootstrap.uv_flags(
        {
            "index-url": "https://index.example/simple",
            "extra-index-url": "https://one.example\nhttps://two.example",
            "find-links": f"{tmp_path} {tmp_path}/missing https://links.example",
            "trusted-host": "index.example",
            "no-index": "false",
            "cert": "/etc/ssl/own.pem",
            "proxy": "http://proxy.example:3128",
        }
    )
    assert flags == [
        *("--default-index", "https://index.example/simple"),
        *("--extra-index-url", "https://one.example", "--extra-index-url", "https://two.example"),
        *("--index-strategy", "unsafe-best-match"),
        *("--find-links", str(tmp_path), "--find-links", "https://links.example"),
        *("--allow-insecure-host", "index.example"),
    ]
    assert variables == {"SSL_CERT_FILE": "/etc/ssl/own.pem", "ALL_PROXY": "http://proxy.example:3128"}
    assert bootstrap.uv_flags({}) == ([], {})


def test_of_pips_settings_the_environment_counts_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a.example\nproxy = http://p.example\n\n[install]\nno-index = yes\n"
    )
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_INDEX_URL", "https://b.example")
    monkeypatch.setattr(bootstrap, "VENV_PYTHON", Path(sys.executable))
    flags, variables = bootstrap.pip_settings()
    assert flags[:2] == ["--default-index", "https://b.example"]
    assert "--no-index" in flags
    assert variables["ALL_PROXY"] == "http://p.example"


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        ("error: Request failed\n  cause: dns error", bootstrap.Unreachable, "no network"),
        ("ERROR: Could not find a version (from versions: none)", bootstrap.Unreachable, "no network?"),
        ("failed to write: No space left on device (os error 28)", bootstrap.Failed, "no space left"),
        ("error: Permission denied (os error 13)", bootstrap.Failed, "must be writable"),
        ("No solution found when resolving dependencies:\n  ╰─▶ no torch", bootstrap.Unresolved, "no torch"),
        ("", bootstrap.Failed, "no message"),
    ],
)
def test_a_failed_command_becomes_one_line_that_names_the_stage(output: str, kind: type, words: str) -> None:
    error = bootstrap.failure("installing vLLM", output)
    assert type(error) is kind
    assert str(error).startswith("installing vLLM failed")
    assert words in str(error)
    assert "\n" not in str(error)


def test_another_python_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "PYTHON", (2, 7))
    assert bootstrap.main() == 2
    line = capsys.readouterr().err
    assert "Python 2.7 is needed" in line
    assert line.count("\n") == 1


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(bootstrap.Failed, match="no C compiler: gcc"):
        bootstrap.check_machine()


def test_the_environment_is_up_to_date() -> None:
    """What `make` runs before everything else has nothing to do."""
    stamp = bootstrap.STAMP.read_text(encoding="utf-8") if bootstrap.STAMP.exists() else ""
    assert stamp == bootstrap.fingerprint(), "run `make bootstrap` first: something has changed"
    assert bootstrap.usable()


# --- the environment of vLLM ----------------------------------------------------------------------


def test_every_cache_of_vllm_lies_inside_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    monkeypatch.setenv("KVTRACE_CONFIG", "{}")
    env = environment.vllm_env()
    for name in (
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
    ):
        assert Path(env[name]).is_relative_to(ROOT / ".cache"), name
    assert "VLLM_PLUGINS" not in env
    assert "KVTRACE_CONFIG" not in env
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_sockets_fit_wherever_the_clone_is(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    env = environment.vllm_env(deep)
    assert env.get("TMPDIR") != str(deep / "tmp")


# --- the tiny model -------------------------------------------------------------------------------


def test_one_word_is_one_token(tiny_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    words = tiny.words()
    assert len(set(words)) == 508
    ids = tokenizer.encode(" ".join(words)).ids
    assert ids == list(range(4, 512))
    assert tokenizer.decode(ids) == " ".join(words)


def test_a_finished_model_is_left_as_it_is(tiny_model: Path) -> None:
    before = (tiny_model / "model.safetensors").stat()
    assert before.st_size > 1_000_000  # real weights
    assert tiny.make_tiny_model(tiny_model) == tiny_model
    assert (tiny_model / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_a_foreign_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(FileExistsError, match="name another folder"):
        tiny.make_tiny_model(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"


# --- install_size ---------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_base_install_is_under_60_mb_and_docs_name_extras() -> None:
    vllm = install_size.needed(install_size.VLLM)
    assert {"torch", "numpy", "typer"} <= vllm
    base = install_size.needed(["kvtrace"])
    assert {"kvtrace", "pandas"} <= base and "torch" not in base
    assert install_size.mb(base - vllm, modules=False) < 60
    page = install_size.PAGE.read_text(encoding="utf-8")
    for extra in ("metrics", "parquet", "pytest", "spy"):
        assert f"| `kvtrace[{extra}]` | " in page.partition(install_size.BEGIN)[2]
