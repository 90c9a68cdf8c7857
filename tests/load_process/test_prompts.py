"""Exact bodies, unique prompts of the asked length, and files with every kind of mistake."""

import hashlib
import json
import time
from pathlib import Path

import pytest

from lpxtop.errors import UsageError
from lpxtop.load.prompt_files import read_entries
from lpxtop.load.prompts import WORDS, Prompts
from lpxtop.plan import Negotiated, Plan, Sampling, Target
from lpxtop.plan import Prompts as PromptPlan


def plan(api="chat", model="m", sampling=None, **prompts):
    target = Target(url="http://h/v1", api=api, model=model)
    return Plan(target=target, sampling=sampling or Sampling(), prompts=PromptPlan(**prompts))


def take(prompts, count=1):
    return [json.loads(prompts.take().json) for _ in range(count)]


def user_text(body):
    return body["messages"][-1]["content"] if "messages" in body else body["prompt"]


# --- bodies --------------------------------------------------------------------------------------------------------


def test_a_chat_body_to_the_byte(tmp_path):
    """Every field of a chat request, in order, as negotiated; the text is escaped once."""
    file = tmp_path / "p.txt"
    file.write_text('say "hi" – ☃\n')
    negotiated = Negotiated(continuous_usage=True, ignore_eos=True, min_tokens=True)
    sampling = Sampling(max_tokens=16, top_p=0.9, extra_body={"seed": 5, "temperature": 0.7})

    body = Prompts(plan(sampling=sampling, path=str(file), system="be brief"), negotiated).take()

    assert body.json.decode() == (
        '{"model":"m","messages":[{"role":"system","content":"be brief"},'
        '{"role":"user","content":"say \\"hi\\" – ☃"}],"max_tokens":16,"temperature":0.7,"top_p":0.9,'
        '"ignore_eos":true,"min_tokens":16,"stream":true,'
        '"stream_options":{"include_usage":true,"continuous_usage_stats":true},"seed":5}'
    )
    assert body.prompt_tokens is None


def test_a_completions_body_to_the_byte(tmp_path):
    """Completions have a prompt; what was negotiated away is not there."""
    file = tmp_path / "p.txt"
    file.write_text("tell me\n")
    negotiated = Negotiated(limit_parameter="max_completion_tokens", include_usage=False)

    body = Prompts(plan("completions", path=str(file), system="S"), negotiated).take()

    assert body.json.decode() == (
        '{"model":"m","prompt":"S\\n\\ntell me","max_completion_tokens":128,"temperature":0.0,"stream":true}'
    )


def test_without_streaming_no_stream_options():
    """stream_options belongs to a stream."""
    (body,) = take(Prompts(plan(sampling=Sampling(stream=False)), Negotiated()))

    assert body["stream"] is False
    assert "stream_options" not in body


def test_without_a_model_none_is_sent():
    """A server with one model may do without its name."""
    (body,) = take(Prompts(plan(model=None), Negotiated()))

    assert "model" not in body


@pytest.mark.parametrize("field", ["model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens"])
def test_extra_body_may_not_take_over(field):
    """What a flag decides, extra_body may not: the error names the flag."""
    with pytest.raises(UsageError, match=field) as caught:
        Prompts(plan(sampling=Sampling(extra_body={field: 1})), Negotiated())

    assert caught.value.hint.startswith("-")


# --- synthetic prompts ---------------------------------------------------------------------------------------------


def test_prompts_are_unique_from_the_very_start():
    """No two prompts of three workers share their first word, so no cached prefix is longer than the template's."""
    starts = []
    for worker in range(3):
        prompts = Prompts(plan(), Negotiated(), mark="ab12cd", worker=worker, workers=3)
        starts += [user_text(body).split()[0] for body in take(prompts, 200)]

    assert len(set(starts)) == 600
    assert sorted(starts) == sorted(f"[{number}-ab12cd]" for number in range(600))


def test_prompts_are_the_same_again():
    """Same seed, same prompts, whatever the number of workers; the run's mark changes only the mark."""
    alone = [user_text(body) for body in take(Prompts(plan(seed=4), Negotiated(), mark="a"), 6)]
    two = [Prompts(plan(seed=4), Negotiated(), mark="a", worker=index, workers=2) for index in (0, 1)]
    split = [user_text(body) for pair in zip(take(two[0], 3), take(two[1], 3), strict=True) for body in pair]
    other = [user_text(body) for body in take(Prompts(plan(seed=4), Negotiated(), mark="b"), 6)]
    seeded = [user_text(body) for body in take(Prompts(plan(seed=5), Negotiated(), mark="a"), 6)]

    assert split == alone
    assert [text.replace("-b]", "-a]") for text in other] == alone
    assert seeded != alone


@pytest.mark.parametrize("tokens", [1, 30, 128, 1000, 40_000])
@pytest.mark.parametrize(("per_word", "overhead"), [(1.0, 20), (1.3, 35), (6.5, 12)])
def test_length_is_what_was_asked(tokens, per_word, overhead):
    """With a measured vocabulary the prompt has the asked length to within a word; one word at least."""
    negotiated = Negotiated(tokens_per_word=per_word, prompt_overhead=overhead)
    prompts = Prompts(plan(tokens=tokens), negotiated)
    body = prompts.take()
    words = len(user_text(json.loads(body.json)).split()) - 1

    counted = overhead + words * per_word
    assert body.prompt_tokens == round(counted)
    assert counted == pytest.approx(tokens, abs=per_word / 2 + 0.5) or words == 1


def test_a_system_prompt_comes_on_top():
    """A long system prompt does not shorten the user's, and counts in what is expected."""
    short, long = plan(tokens=200), plan(tokens=200, system="word " * 100)
    without, with_ = (Prompts(which, Negotiated()) for which in (short, long))

    assert with_.synthetic.words == without.synthetic.words
    assert with_.take().prompt_tokens == without.take().prompt_tokens + 130


def test_words_need_no_escapes():
    """Synthetic text is spliced into JSON as it is: plain lower-case words only."""
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_a_body_takes_microseconds():
    """Also a prompt of 32 000 tokens must not stall the loop: well below a millisecond each."""
    prompts = Prompts(plan(tokens=32_000), Negotiated())
    begin = time.perf_counter()
    for _ in range(50):
        prompts.take()

    assert (time.perf_counter() - begin) / 50 < 0.001


def test_the_description_identifies_the_set(tmp_path):
    """Same set, same hash; another seed, length or file, another hash; a file's hash is that of its entries."""
    file = tmp_path / "p.txt"
    file.write_text("a\nb\n")
    hashes = [
        Prompts(which, Negotiated(), mark=mark).describe()["sha256"]
        for which, mark in [
            (plan(), "x"), (plan(), "y"), (plan(seed=1), "x"), (plan(tokens=64), "x"), (plan(path=str(file)), "x"),
        ]
    ]  # fmt: skip

    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4
    assert hashes[4] == hashlib.sha256(b'[null,["a","b"]]').hexdigest()
    assert Prompts(plan(path=str(file)), Negotiated()).describe()["entries"] == 2


def test_the_probe_is_no_prompt_of_the_run(tmp_path):
    """Probing must not warm the cache for a measured request: its own mark, or a file's last entry."""
    file = tmp_path / "p.txt"
    file.write_text("a\nb\nc\n")
    synthetic = Prompts(plan(), Negotiated(), mark="m")
    probed = user_text(json.loads(synthetic.probe()))

    assert probed.startswith("[probe-m] ")
    assert probed not in [user_text(body) for body in take(synthetic, 50)]
    assert user_text(json.loads(Prompts(plan(path=str(file)), Negotiated()).probe())) == "c"


# --- files ---------------------------------------------------------------------------------------------------------


def entries(tmp_path, text, name="p.jsonl", api="chat"):
    file = tmp_path / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_entries(file, api)


MESSAGES = [{"role": "user", "content": "hi"}]
SHARE = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                           {"from": "gpt", "value": "a"}]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.txt", "one\n\n  two \r\nthree", ["one", "  two ", "three"]),
        ("p.txt", '{"prompt": "x"}\n', ['{"prompt": "x"}']),
        ("p.txt", "a\u2028b\x0cc\n", ["a\u2028b\x0cc"]),
        ("p.jsonl", '{"prompt": "x"}\n\n' + json.dumps({"messages": MESSAGES}) + '\n"bare"\n', ["x", MESSAGES, "bare"]),
        ("p.jsonl", json.dumps(SHARE), ["q"]),
        ("p.json", json.dumps([SHARE, {"prompt": "x"}]), ["q", "x"]),
        ("prompts", '{"prompt": "x"}\n', ["x"]),
        ("prompts", json.dumps([{"prompt": "x"}]), ["x"]),
        ("prompts", "plain\n", ["plain"]),
        ("p.txt", "\ufeffwith a mark\n", ["with a mark"]),
    ],
)
def test_files_by_shape(tmp_path, name, text, expected):
    """Text lines, JSON lines, ShareGPT and lists; empty lines and a byte order mark are nothing."""
    assert entries(tmp_path, text, name) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl:2: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"text": "b"}\n', r"p\.jsonl:3: has none of prompt, messages, conversations"),
        ("p.jsonl", '{"prompt": 3}\n', r"p\.jsonl:1: prompt is not a text"),
        ("p.jsonl", '{"prompt": " "}\n', r"p\.jsonl:1: prompt is not a text, or an empty one"),
        ("p.jsonl", '{"messages": [{"content": "x"}]}\n', r"p\.jsonl:1: messages is not a list of objects"),
        ("p.jsonl", '{"conversations": [{"from": "gpt", "value": "x"}]}\n', r"p\.jsonl:1: conversations has no turn"),
        ("p.jsonl", "[1]\n", r"p\.jsonl:1: neither text nor an object"),
        ("p.json", '[{"prompt": "a"}, 5]', r"p\.json: entry 2: neither text"),
        ("p.json", '{"prompt": "a"}', r"p\.json: not a list"),
        ("p.txt", "\n \n", r"p\.txt: no prompt in it"),
        ("p.txt", b"good\nbad \xff\n", r"p\.txt:2: not UTF-8"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, name, text, message):
    """Every mistake says where it is."""
    with pytest.raises(UsageError, match=message):
        entries(tmp_path, text, name)


def test_a_missing_file():
    """A file that is not there is named with the flag."""
    with pytest.raises(UsageError, match="--prompts /no/such: No such file"):
        read_entries(Path("/no/such"))


def test_messages_are_for_chat(tmp_path):
    """Messages with the completions API are refused, not flattened."""
    with pytest.raises(UsageError, match=r"p\.jsonl:1: messages are for the chat API"):
        entries(tmp_path, json.dumps({"messages": MESSAGES}), api="completions")


def test_entries_go_round_and_are_shared_out(tmp_path):
    """Two workers take turns through the file and begin again at its end; messages are sent as they are."""
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in ("a", {"messages": MESSAGES}, "c")))
    workers = [Prompts(plan(path=str(file)), Negotiated(), worker=index, workers=2) for index in (0, 1)]

    assert [user_text(body) for body in take(workers[0], 4)] == ["a", "c", "hi", "a"]
    assert [user_text(body) for body in take(workers[1], 3)] == ["hi", "a", "c"]


def test_an_entrys_own_system_message_stays(tmp_path):
    """The plan's system prompt is put before messages that have none, never a second one."""
    own = [{"role": "system", "content": "mine"}, *MESSAGES]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in (own, MESSAGES)))
    bodies = take(Prompts(plan(path=str(file), system="ours"), Negotiated()), 2)

    assert bodies[0]["messages"] == own
    assert bodies[1]["messages"] == [{"role": "system", "content": "ours"}, *MESSAGES]
