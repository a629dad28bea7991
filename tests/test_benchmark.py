"""benchmarks/attention.py: what it counts, what it refuses to time, how it reports, and the whole command."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from cases import CASES, Case, Sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import attention as benchmark
import contenders
import layer
import workload

SMALL = Sizes(2, 30, 40, 4, 2, 8, 8)


def shown(arguments: dict[str, Any], sizes: Sizes) -> int:
    """Visible pairs, from the oracle's mask."""
    shapes = {"query": np.empty((sizes.batch, sizes.rows, sizes.heads, 1))}
    shapes["key"] = np.empty((sizes.batch, sizes.keys, sizes.kv_heads, 1))
    return int(oracle.visible(shapes | arguments).sum())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pairs_of_a_model(case: Case) -> None:
    sizes = case.small_sizes()
    arguments = case.extras(sizes, np.random.default_rng(0))
    assert workload.visible_pairs(arguments, sizes) == shown(arguments, sizes)


@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": True, "query_offset": "end"},
        {"is_causal": True, "query_offset": -7},
        {"local_window_size": 3},
        {"local_window_size": (None, 5), "query_offset": np.array([-20, 35], np.int32)},
        {"local_window_size": (4, None), "is_causal": True, "key_value_seq_lengths": np.array([0, 17], np.int32)},
        {"query_seq_lengths": np.array([30, 9], np.int32), "local_window_size": (2, 9)},
        {"row_bounds": (np.full((2, 30), 25, np.int32), np.arange(60, dtype=np.int32).reshape(2, 30))},
        {"mask": np.arange(4 * 30 * 40).reshape(1, 4, 30, 40) % 3 == 0, "is_causal": True},
        {"mask": np.arange(40) % 3 == 0, "local_window_size": (4, 4)},
        {
            "query_segment_ids": np.arange(60, dtype=np.int32).reshape(2, 30) % 3,
            "key_value_segment_ids": np.arange(80, dtype=np.int32).reshape(2, 40) % 4 - 1,
            "is_causal": True,
        },
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_pairs_of_masks(arguments: dict[str, Any]) -> None:
    assert workload.visible_pairs(arguments, SMALL) == shown(arguments, SMALL)


def test_operations_of_a_full_call() -> None:
    batch, length, heads, width = 2, 48, 4, 16
    counted = workload.flops(Sizes(batch, length, length, heads, heads, width, width), batch * heads * length * length)
    assert counted["forward"] == 4 * batch * heads * length * length * width
    assert counted["backward"] == 2.5 * counted["forward"]
    assert counted["forward+backward"] == counted["forward"] + counted["backward"]


def test_every_model_of_the_report_is_a_case() -> None:
    names = {one.name.split()[0] for one in workload.models()}
    assert names == set(workload._OTHER_LENGTHS)
    for family in ("llama3_8b", "llama3_70b", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "vit"):
        assert any(name.startswith(family) for name in names)
    everything = [one.name for one in [*workload.cpu_grid(), *workload.gpu_grid(), *workload.models(all_of_them=True)]]
    assert len(set(everything)) == len(everything)


def column(contender: str, work: str, *seconds: float, reason: str | None = None) -> benchmark.Column:
    return benchmark.Column(contender, work, seconds=list(seconds), reason=reason)


def report_of_two_rows() -> benchmark.Report:
    report = benchmark.Report("base", True, ["ours", "base"])
    for name, ours in (("first", (1.0, 3.0, 2.0)), ("second", (8.0,))):
        rows = [column("ours", "forward", *ours), column("ours", "forward+backward", 10.0)]
        rows += [column("base", "forward", 4.0), column("base", "forward+backward", reason="has no mask")]
        one = workload.Workload(name, SMALL, "bfloat16", lambda sizes, rng: {})
        report.rows.append((one, {"forward": 12 * 10**12, "forward+backward": 10**13, "backward": 10**12}, rows))
    return report


def test_lines_have_speeds_and_ratios_of_medians() -> None:
    report = report_of_two_rows()
    forward, both, backward = report.lines(*report.rows[0])
    assert re.fullmatch(r"first +forward +6 +2\.00 +3 +1\.00", forward)
    assert re.fullmatch(r"first +forward\+backward +1 +-", both.replace("  ", " ").rstrip())
    assert re.fullmatch(r"first +backward +0 +-", backward.rstrip())


def test_geometric_means_count_their_rows() -> None:
    forward, both, backward = report_of_two_rows().means()
    # Ratios 4 / 2 and 4 / 8.
    assert re.search(r"forward +1\.000 +\(2\) +1\.000 +\(2\)$", forward)
    assert re.search(r"forward\+backward +- +\(0\) +- +\(0\)$", both)
    assert re.search(r"backward +- +\(0\) +- +\(0\)$", backward)


def test_a_dash_is_explained_once() -> None:
    report = report_of_two_rows()
    assert report.reasons() == ["  base: has no mask [first (forward+backward); second (forward+backward)]"]
    for _, _, columns in report.rows:
        columns[2].reason = "has no mask"
    assert report.reasons() == ["  base: has no mask [everywhere]"]


def call(name: str = "S=256 float32 causal", **extras: Any) -> contenders.Call:
    one = next(one for one in workload.cpu_grid() if one.name == name)
    return contenders.Call.of(workload.Workload(one.name, one.sizes, one.dtype, lambda sizes, rng: extras))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what is missing without a GPU")
def test_every_peer_says_why_it_cannot_run() -> None:
    for peer in contenders.peers():
        if peer.name != "xla":
            with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
                peer.bind(call())


@pytest.mark.parametrize("peer", contenders.peers(), ids=lambda peer: peer.name)
def test_every_peer_says_what_it_has_not(peer: contenders.Contender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(contenders, "_capability", lambda: "9.0")
    with pytest.raises(NotImplementedError, match="has no row_bounds"):
        peer.bind(call(row_bounds=(np.zeros((1, 256), np.int32), np.ones((1, 256), np.int32))))


@pytest.mark.parametrize("name", ["FA3", "tokamax"])
def test_a_peer_that_is_not_installed_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(contenders, "_capability", lambda: "9.0")
    monkeypatch.setitem(sys.modules, {"FA3": "dew_flash_attn"}.get(name, name), None)
    peer = next(peer for peer in contenders.peers() if peer.name == name)
    with pytest.raises(NotImplementedError, match="cannot be imported"):
        peer.bind(call())


def test_what_jax_fa4_has_is_found() -> None:
    assert "fa4 tiled" in [one.name for one in contenders.ours()]


def right(call: contenders.Call) -> contenders.Attention:
    return lambda q, k, v, arrays: jax.nn.dot_product_attention(q, k, v, **call.options)


def without_a_key(call: contenders.Call) -> contenders.Attention:
    """One key of 64 is missing, and only from half of the rows."""
    mask = np.ones((64, 64), bool)
    mask[32:, 3] = False
    return lambda q, k, v, arrays: jax.nn.dot_product_attention(q, k, v, mask=mask, **call.options)


def with_a_wrong_gradient(call: contenders.Call) -> contenders.Attention:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any) -> jax.Array:
        return right(call)(q, k + 0.1 * (k - jax.lax.stop_gradient(k)), v, arrays)

    return attend


def test_a_wrong_answer_is_not_timed() -> None:
    """Nor is one that fails; both leave the others alone."""
    candidates = [
        contenders.Contender("xla", right),
        contenders.Contender("mask", without_a_key),
        contenders.Contender("gradient", with_a_wrong_gradient),
        contenders.Contender("broken", lambda call: lambda q, k, v, arrays: v[0]),
    ]
    one = workload.Workload("small", Sizes(2, 64, 64, 2, 2, 16, 16), "bfloat16", lambda sizes, rng: {"is_causal": True})
    _, columns = benchmark.measure(one, candidates, time.perf_counter())
    reasons = {(column.contender, column.work): str(column.reason) for column in columns if not column.seconds}
    assert reasons.keys() == {(column.contender, column.work) for column in columns if column.reason is not None}
    assert [place for place in reasons if place[0] in ("xla", "gradient")] == [("gradient", "forward+backward")]
    assert "wrong: dkey " in reasons["gradient", "forward+backward"]
    assert "wrong: out " in reasons["mask", "forward"]
    assert "wrong: out " in reasons["mask", "forward+backward"]
    assert ("broken", "forward") in reasons


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cases", "^S=256 bfloat16 causal$", "--implementations", "tiled|xla|FA3", "--budget", "0"]
    benchmark.main([*options, "--json", str(tmp_path / "raw.json"), "--plot", str(tmp_path / "plot.png")])
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "raw.json").read_text())
    (row,) = document["rows"]
    assert [column["contender"] for column in row["columns"]] == [n for n in ("fa4 tiled", "xla", "FA3") for _ in "ab"]
    timed = [column for column in row["columns"] if column["contender"] != "FA3"]
    assert all(column["seconds"] and 0 < column["error"] <= 1 for column in timed)
    assert "S=256 bfloat16 causal" in printed
    assert "geometric mean" in printed
    assert re.search(r"temporaries, MiB +\d+ +\d+ +-\n", printed)
    if jax.default_backend() != "gpu":
        assert "FA3: needs an NVIDIA GPU" in printed
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_that_nothing_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--cases", "no such case"])
    assert "no case has such a name" in capsys.readouterr().err


def test_a_launch_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(benchmark, "_CHAIN", 3)
    launches = benchmark.launch_overhead([contenders.Contender("cudnn", right), contenders.Contender("other", right)])
    launches["other"] = {kind: 2 * seconds for kind, seconds in launches["cudnn"].items()}
    benchmark.print_launches(launches, "cudnn")
    printed = capsys.readouterr().out
    assert re.search(r"cudnn( +\d+\.\d\d +1\.00){3}\n", printed)
    assert re.search(r"other( +\d+\.\d\d +2\.00){3}\n", printed)


def test_a_layer_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(layer, "MODEL", 64)
    monkeypatch.setattr(layer, "INSIDE", 128)
    monkeypatch.setattr(sys, "argv", ["layer.py", "--length", "64", "--batch", "1", "--rounds", "2"])
    layer.main()
    assert re.search(r"jax_fa4 \w+ +\d+\.\d\d ms +ratio \d\.\d{3} +temporaries \d+ MiB", capsys.readouterr().out)


def test_a_wrong_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MODEL", 64)
    monkeypatch.setattr(layer, "INSIDE", 128)
    monkeypatch.setattr(
        layer, "attentions", lambda: {"right": jax.nn.dot_product_attention, "wrong": lambda q, k, v: q}
    )
    monkeypatch.setattr(sys, "argv", ["layer.py", "--length", "64", "--batch", "1", "--rounds", "1"])
    with pytest.raises(AssertionError, match="wrong"):
        layer.main()
