"""The benchmarks: every treatment is what it says, what fails is recorded, and the page is made of the results."""

import json
import re
import xml.etree.ElementTree as ElementTree

import cost_page
import growth
import overhead
import plot
import pytest
import step_time
import steps
import torch
from floor import least_bytes
from hosts import Host, drop_keys, gpt2, images, tokens, vit
from literal import Hook, LiteralTraces
from together import together
from torch._subclasses.fake_tensor import FakeTensorMode
from treatments import RATE, STRENGTH, TREATMENTS, Treatment, plain_autograd

import cells
import explicit_dropout as xd
from explicit_dropout import kernels, reference
from explicit_dropout.kernels import energy

pytest.importorskip("transformers")

WIDTH, INNER, LAYERS, BATCH = 16, 32, 2, 3
TINY = {
    "ViT": Host(lambda p: vit(p, image=8, patch=4, width=WIDTH, layers=LAYERS, heads=2, inner=INNER), images(BATCH, 8)),
    "GPT-2": Host(lambda p: gpt2(p, width=WIDTH, layers=LAYERS, heads=2, length=8), tokens(BATCH, 8)),
}
NO_CAUSAL_TRACE = ("GPT-2", "Q+FF paper, literal traces")
pytestmark = pytest.mark.filterwarnings("ignore:.*loss_type.*")


@pytest.fixture(scope="module", autouse=True)
def compiler_as_it_was():
    """Benchmarks tell the compiler what other tests should not hear."""
    config = torch._dynamo.config
    kept = {name: getattr(config, name) for name in ("skip_nnmodule_hook_guards", "recompile_limit")}
    with config.patch(**kept):
        yield
    torch._dynamo.reset()


def tiny(name: str = "ViT", dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    model = TINY[name].make(dropout).train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and the last layer are zero otherwise
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


# ---------------------------------------------------------------------------------------------- treatments


@pytest.mark.parametrize("host", TINY)
@pytest.mark.parametrize("name", TREATMENTS)
def test_a_step_runs_under_every_treatment_and_changes_the_weights(host, name):
    treatment = TREATMENTS[name]
    if (host, name) == NO_CAUSAL_TRACE:
        with pytest.raises(NotImplementedError, match="causal"):
            steps.training_step(TINY[host], treatment, "cpu", "eager")
        return
    models = []
    remembering = Host(lambda p: models.append(TINY[host].make(p)) or models[-1], TINY[host].batch)
    with treatment.context():
        step, size = steps.training_step(remembering, treatment, "cpu", "eager")
        before = [parameter.detach().clone() for parameter in models[0].parameters()]
        step()
    assert size > 0
    assert any(not torch.equal(old, new) for old, new in zip(before, models[0].parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in models[0].parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("host", TINY)
@pytest.mark.parametrize("name", [name for name in TREATMENTS if name != NO_CAUSAL_TRACE[1]])
def test_a_replayed_step_trains_as_an_eager_one_does(host, name):
    treatment, moved = TREATMENTS[name], []
    for mode in ("eager", "graph"):
        models = []
        remembering = Host(lambda p, models=models: models.append(TINY[host].make(p)) or models[-1], TINY[host].batch)
        with treatment.context():
            step, size = steps.training_step(remembering, treatment, "cuda", mode)
            before = [parameter.detach().clone() for parameter in models[0].parameters()]
            for _ in range(3):
                step()
        assert size > 0
        changes = [(new - old).abs().mean() for old, new in zip(before, models[0].parameters(), strict=True)]
        moved.append(torch.stack(changes).mean().item())
    assert moved[0] > 0
    assert moved[1] == pytest.approx(moved[0], rel=0.5)


@pytest.mark.parametrize("host", TINY)
def test_drop_key_drops_in_train_mode_and_is_plain_attention_in_eval_mode(host):
    model, batch = tiny(host), TINY[host].batch
    plain = model(**batch).logits.detach()
    drop_keys(model, RATE)
    first, second = (model(**batch).logits.detach() for _ in range(2))
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, plain)
    torch.testing.assert_close(model.eval()(**batch).logits.detach(), plain)


def test_drop_key_drops_the_share_of_keys_that_it_says():
    model = tiny()
    drop_keys(model, RATE)
    weights = []
    for module in model.modules():
        if hasattr(module, "drop_key"):
            module.drop_key.register_forward_hook(lambda *call: weights.append(call[-1]))
    for _ in range(200):
        model(**TINY["ViT"].batch)
    dropped = torch.stack(weights[: LAYERS * 200]) == 0
    assert abs(dropped.float().mean() - RATE) < 0.01


@pytest.mark.parametrize("name", ["stochastic V+FF", "stochastic Q+FF", "DropKey+FF"])
def test_stochastic_dropout_acts_on_the_inputs_of_the_sites_and_in_train_mode_only(name):
    model, batch = tiny(), TINY["ViT"].batch
    plain = model(**batch).logits.detach()
    assert TREATMENTS[name].attach(model) is None
    sites, zeros = xd.find_sites(model), {}

    def see(module, args, _):
        zeros[module] = (args[0] == 0).float().mean()

    for module in {site.projection.module for site in sites}:
        module.register_forward_hook(see)
    model(**batch)
    dropped = {module for module, share in zeros.items() if share > RATE / 2}
    assert dropped == {site.projection.module for site in sites if site.component in TREATMENTS[name].components}
    torch.testing.assert_close(model.eval()(**batch).logits.detach(), plain)


@pytest.mark.parametrize("name", ["V+FF paper", "V+FF bernoulli", "Q+FF paper"])
def test_literal_traces_are_the_penalty_of_the_library_in_value_and_gradient(name):
    treatment, found = TREATMENTS[name], []
    for attach in (treatment.attach, Treatment("literal", treatment.components, treatment.noise).attach):
        model = tiny().double()
        penalty = attach(model)
        model(pixel_values=TINY["ViT"].batch["pixel_values"].double())
        value = penalty()
        value.backward()
        slopes = [p.grad for path, p in model.named_parameters() if p.grad is not None and "weight" in path]
        found.append((value.detach(), slopes))
    assert isinstance(penalty, LiteralTraces)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-12, check_dtype=False)


def test_a_literal_trace_is_that_of_the_reference():
    x, model = torch.randn(BATCH, 5, WIDTH), torch.nn.Sequential(torch.nn.Linear(WIDTH, 7))
    site = next(site for site in xd.find_sites(tiny()) if site.component == "feed_forward")
    traces = LiteralTraces(model, xd.bernoulli(RATE), (), STRENGTH)
    weight = site.projection.parameters()[0]
    expected = reference.linear(x, weight, xd.bernoulli(RATE), reduction="sample") * BATCH
    torch.testing.assert_close(Hook(traces, site).linear(x), expected)


@pytest.mark.parametrize("host", TINY)
def test_gelu_by_torch_is_the_same_function_in_one_operation(host):
    model, batch = tiny(host), TINY[host].batch
    plain = model(**batch).logits.detach()
    before = len(activations(model))
    assert TREATMENTS["none, GELU by torch"].attach(model) is None
    assert activations(model) == {torch.nn.GELU}
    assert before == 1
    torch.testing.assert_close(model(**batch).logits.detach(), plain)


def activations(model):
    return {type(module) for module in model.modules() if kernels.activation_of(module)}


def test_plain_autograd_switches_every_kernel_off_and_on_again(monkeypatch):
    monkeypatch.setattr(energy, "HAS_TRITON", True)
    with FakeTensorMode():
        x = torch.empty(2, 3, 4, device="cuda", dtype=torch.bfloat16)
    here = torch.randn(2, 3, 4)
    before = kernels.serves(here)
    assert energy.serves_compiled(x)
    with plain_autograd():
        assert not energy.serves_compiled(x)
        assert not kernels.serves(here)
        assert not kernels.serves_scores(here, here, 2)
    assert energy.serves_compiled(x)
    assert kernels.serves(here) == before


# ---------------------------------------------------------------------------------------------- the floor


def test_the_floor_counts_four_passes_over_the_outputs_of_a_coherent_penalty():
    """By hand: 5 tokens, value and second layer as wide as the model; an activation has the first layer's energy."""
    rows = BATCH * 5
    outputs = LAYERS * rows * (WIDTH + WIDTH) * 4
    assert least_bytes(TINY["ViT"], TREATMENTS["V+FF paper"], "cpu") == 4 * outputs


def test_the_floor_counts_inputs_and_weights_of_an_incoherent_penalty_and_both_sides_of_scores():
    rows = BATCH * 5
    inputs = LAYERS * rows * (WIDTH + WIDTH) * 4  # that of the second layer is an activation's output
    weights = LAYERS * (WIDTH * WIDTH + 2 * WIDTH * INNER) * 4
    assert least_bytes(TINY["ViT"], TREATMENTS["V+FF inverted"], "cpu") == 4 * (inputs + weights)
    feed_forward = LAYERS * rows * WIDTH * 4
    assert least_bytes(TINY["ViT"], TREATMENTS["Q+FF paper"], "cpu") == 4 * (
        feed_forward + 2 * LAYERS * rows * WIDTH * 4
    )


def test_an_input_that_autocast_lowers_is_summed_on_the_way():
    host = TINY["ViT"]
    calls_in_half = []

    def half(p):
        model = host.make(p)
        forward = model.forward

        def lowered(**batch):
            with torch.autocast("cpu", torch.bfloat16):
                return forward(**batch)

        model.forward = lowered
        calls_in_half.append(model)
        return model

    rows = BATCH * 5
    weights = LAYERS * (WIDTH * WIDTH + 2 * WIDTH * INNER) * 4
    narrow = LAYERS * rows * 2 * WIDTH * 2  # what layer norm makes in float32
    found = least_bytes(Host(half, host.batch), TREATMENTS["V+FF inverted"], "cpu")
    assert calls_in_half
    assert found == narrow + 4 * weights


def test_what_has_no_floor_says_so():
    assert least_bytes(TINY["ViT"], TREATMENTS["AV+FF inverted"], "cpu") is None
    assert least_bytes(TINY["ViT"], TREATMENTS["stochastic V+FF"], "cpu") is None


def test_layers_that_make_queries_keys_and_values_at_once_count_what_belongs_to_each():
    rows = BATCH * 8
    outputs = LAYERS * rows * (WIDTH + WIDTH) * 4  # those of the first feed-forward layers are an activation's
    assert least_bytes(TINY["GPT-2"], TREATMENTS["V+FF paper"], "cpu") == 4 * outputs


# ---------------------------------------------------------------------------------------------- the runs


def measured(treatments, mode="eager", host=TINY["ViT"]):
    return list(step_time.measure(host, treatments, "cpu", mode, 0.0, False, {}))


def test_a_cell_that_fails_is_recorded_and_the_next_one_is_measured(monkeypatch):
    attach = Treatment.attach

    def until_memory_ends(self, model):
        if self.kind == "literal":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")
        return attach(self, model)

    monkeypatch.setattr(Treatment, "attach", until_memory_ends)
    rows = measured(["none", "V+FF paper, literal traces", "V+FF paper"])
    assert rows[1] == {"treatment": "V+FF paper, literal traces", "error": "out of memory"}
    assert [row["treatment"] for row in rows if "seconds" in row] == ["none", "V+FF paper"]
    assert "out of memory" in step_time.line({"model": "ViT", "mode": "eager", **rows[1]})


def test_a_mode_that_fails_altogether_is_a_row_for_each_treatment():
    rows = measured(["none", "V+FF paper"], mode="graph")
    assert [row["error"] for row in rows] == ["RuntimeError: a CUDA graph needs a GPU"] * 2


def test_running_out_of_memory_inside_another_error_is_still_that():
    error = RuntimeError("capture failed")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert steps.failure(error) == "out of memory"
    assert steps.failure(ValueError("a\nb")) == "ValueError: a"


@pytest.fixture(scope="module")
def step_results(tmp_path_factory):
    output = tmp_path_factory.mktemp("results") / "step-time-tiny"
    command = ["--budget", "1e-3", "--output", str(output), "--treatments"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time, "hosts", lambda _: {"tiny ViT": TINY["ViT"]})
        step_time.main([*command, "none", "V+FF paper"])
        step_time.main([*command, "V+FF paper", "Q+FF paper", "--modes", "eager", "graph", "--add"])
    return output


def test_step_time_writes_its_results_and_adds_to_them(step_results):
    result = json.loads(step_results.with_suffix(".json").read_text())
    cells = [(row["mode"], row["treatment"]) for row in result["rows"]]
    assert cells == [
        ("eager", "none"), ("eager", "V+FF paper"), ("eager", "Q+FF paper"),
        ("graph", "V+FF paper"), ("graph", "Q+FF paper"),
    ]  # fmt: skip
    assert len(result["commands"]) == 2
    lines = step_results.with_suffix(".md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| tiny")] == [step_time.line(row) for row in result["rows"]]


def test_results_of_another_machine_are_not_added_to(step_results, tmp_path):
    result = json.loads(step_results.with_suffix(".json").read_text())
    result["environment"]["device"] = "another"
    (tmp_path / "moved.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="elsewhere"):
        step_time.main(["--output", str(tmp_path / "moved"), "--add"])


def test_cells_get_ready_together_and_measure_one_after_the_other():
    rows = list(together(cells.timed, [("slow", 1.0), ("fast", 0.0), ("fails", 0.5)]))
    assert {row["name"] for row in rows} == {"slow", "fast", "fails"}
    first, second = sorted((row for row in rows if "error" not in row), key=lambda row: row["begin"])
    assert first["begin"] >= max(first["ready"], second["ready"])
    assert second["begin"] >= first["end"]


def test_a_cell_whose_process_dies_is_told_of_and_holds_nobody_up():
    with pytest.raises(RuntimeError, match=r"'killed',.* ended without a result"):
        list(together(cells.killed, [("well",), ("killed",)]))


def test_step_time_of_cells_together_has_the_same_rows(tmp_path):
    command = ["--budget", "1e-3", "--together", "--treatments", "none", "V+FF paper", "--output", str(tmp_path / "t")]
    step_time.main(command)
    result = json.loads((tmp_path / "t.json").read_text())
    assert {row["treatment"]: row["time_ratio"] > 0 for row in result["rows"]} == {"none": True, "V+FF paper": True}


@pytest.fixture(scope="module")
def growth_results(tmp_path_factory):
    output = tmp_path_factory.mktemp("results") / "growth-tiny"
    plan = growth.Plan(2, 8, (4, 16), (16, 32), (1, 2), {"tokens": 4, "width": 16, "depth": 1})
    original = growth.measure

    def measure(host, name, *rest):
        wide = host.make(0.0).config.hidden_size > 16
        return {"error": "out of memory"} if wide and "literal" in name else original(host, name, *rest)

    names = ["none", "V+FF paper", "V+FF paper, literal traces"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "PLANS", {"cpu": plan})
        patch.setattr(growth, "measure", measure)
        growth.main(["--budget", "1e-3", "--output", str(output), "--treatments", *names])
    return output


def test_growth_measures_every_point_until_a_curve_ends(growth_results):
    rows = json.loads(growth_results.with_suffix(".json").read_text())["rows"]
    assert len(rows) == 3 * 2 * 3
    ended = [row for row in rows if "error" in row]
    assert [(row["axis"], row["width"]) for row in ended] == [("width", 32)]
    assert all(row["memory_ratio"] > 0 for row in rows if "error" not in row)


# ---------------------------------------------------------------------------------------------- figures, page


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg", "", svg)  # nothing is fetched
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_figures_are_well_formed_and_say_what_they_show(step_results, growth_results):
    shown = texts(step_results.with_suffix(".svg").read_text())
    assert {"tiny ViT", "V+FF paper", "Q+FF paper", "eager", "1 ×"} <= set(shown)
    shown = texts(growth_results.with_suffix(".svg").read_text())
    assert {"tokens", "width", "depth", "ms", "out of memory", "V+FF paper, literal traces"} <= set(shown)


def test_names_with_odd_characters_are_escaped():
    bars = {"a < b & c": [plot.Bar('"<x>"', {"eager": 1.5}, floor=1.2)]}
    assert {"a < b & c", '"<x>"', "the floor"} <= set(texts(plot.ratios("t", "s", bars, ["eager"])))


def test_ticks_are_round_and_few():
    for low, high in ((0.97, 1.1), (0.97, 12.0), (0.5, 4000.0), (1e-3, 2e5)):
        ticks = plot.Scale(low, high, 0, 1).ticks(8)
        assert 1 <= len(ticks) <= 8
        assert all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)


def test_the_page_of_costs_is_made_of_the_result_files():
    """If not: python benchmarks/cost_page.py"""
    for path, text in cost_page.pages().items():
        assert path.read_text() == text, f"{path.name} is older than the results"


def test_a_ratio_that_modes_do_not_share_is_shown_from_where_to_where():
    rows = [{"memory_ratio": value} for value in (1.237, 1.059, 1.061)]
    assert cost_page.ratios(rows, "memory_ratio") == "1.06–1.24"
    assert cost_page.ratios(rows[1:], "memory_ratio") == "1.06"
    assert cost_page.ratios(rows, "floor_ratio") == "–"


def test_the_page_has_rows_for_new_results(step_results, growth_results):
    results = dict.fromkeys(cost_page.COMMANDS)
    results |= {"step-time-h200": json.loads(step_results.with_suffix(".json").read_text())}
    results |= {"growth-h200": json.loads(growth_results.with_suffix(".json").read_text())}
    for row in results["step-time-h200"]["rows"]:
        if "error" not in row:
            row |= {"floor_bytes": 10**9, "floor_seconds": 1e-3, "floor_ratio": 1.02, "none_busy_ms": 50.0}
            row["profile"] = {"busy_ms": 55.0, "launches": 120, "kernels": [{"name": "_energies", "ms": 2.0}]}
    results["step-time-h200"]["ceilings"] = {"copy_bytes_per_second": 1e12, "matmul_flop_per_second": 1e14}
    text = cost_page.filled(cost_page.PAGE.read_text(), results)
    assert "| tiny ViT | eager | Q+FF paper | 1.00 | 1.00 | 1.02 | 1.10 |" in text
    assert "A copy moved 1.00 TB/s here" in text
    assert "- Fails: V+FF paper (tiny ViT, graph); Q+FF paper (tiny ViT, graph): RuntimeError: a CUDA graph" in text
    assert re.search(r"\| width 16, 32 \| V\+FF paper, literal traces \| \d.*, out of memory \|", text)
    assert "Not measured yet: `python benchmarks/trainer.py" in text
    assert re.search(r"V\+FF, AV\+FF take at most 1.03 × \| \d of 1 ", text)
    assert text == cost_page.filled(text, results)


# ---------------------------------------------------------------------------------------------- what a site costs


def test_an_empty_function_of_autograd_takes_part_in_a_step_and_adds_nothing():
    plain, hooked = tiny(), tiny()
    penalty = overhead.Bare(function=True).attach(hooked)
    for model in (plain, hooked):
        loss = model(**TINY["ViT"].batch).loss
        (loss if model is plain else loss + penalty()).backward()
    fc2 = [name for name, _ in plain.named_parameters() if name.endswith("fc2.weight")]
    assert fc2
    gradients = dict(hooked.named_parameters())
    assert all(gradients[name].grad.abs().max() == 0 for name in fc2)  # its gradients are the empty ones
    assert torch.equal(dict(plain.named_parameters())["classifier.weight"].grad, gradients["classifier.weight"].grad)


def test_what_a_site_costs_is_the_time_that_a_step_takes_longer_over_its_sites(monkeypatch, tmp_path, capsys):
    found = {"none_seconds": 0.010, "time_ratio": 1.36, "ratio_spread": 0.036, "turns": 5}
    monkeypatch.setattr(overhead, "beside", lambda *_: found)
    monkeypatch.setattr(overhead, "HOST", TINY["ViT"])
    monkeypatch.setattr(overhead, "CASES", {"V+FF paper": TREATMENTS["V+FF paper"]})
    threads = torch.get_num_threads()
    try:
        overhead.main(["--output", str(tmp_path / "overhead")])
    finally:
        torch.set_num_threads(threads)
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert result["sites"] == 3 * LAYERS
    assert result["rows"][0]["microseconds"] == pytest.approx(0.36 * 1e4 / (3 * LAYERS))
    assert "| V+FF paper | 600 | 30 | 1.36 |" in capsys.readouterr().out
    assert "600 ± 30" in cost_page.overhead({"overhead-cpu": result})
