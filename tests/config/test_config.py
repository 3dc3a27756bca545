from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stppo.algorithm.variants import VARIANTS
from megatron_stppo.config import AlgorithmConfig, Config, ConfigError
from megatron_stppo.config.algorithm import ONLY_WITH
from megatron_stppo.config.file import load

EXAMPLES = Path(__file__).parents[2] / "examples"


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def minimal(folder: Path) -> Path:
    return written(folder, "model: {path: m}\n")


@pytest.mark.parametrize("name", ["quickstart", "medical_choice", "reasoning_gym", "search_agent"])
def test_examples_load_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    config = load(EXAMPLES / name / "config.yaml")
    assert load(written(tmp_path, config.dump())) == config


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(minimal(tmp_path), ["run.root=~/runs", "data.train=~/t.jsonl", "model.path=/m~"])
    assert (config.run.root, config.data.train) == (tmp_path / "runs", tmp_path / "t.jsonl")
    assert config.model.path == Path("/m~")
    with pytest.raises(ConfigError, match=r"run\.root: ~nobody-here/runs names a user who has no home"):
        load(minimal(tmp_path), ["run.root=~nobody-here/runs"])


def test_the_fields_that_differ_from_the_preset_are_named(tmp_path: Path) -> None:
    def named(*overrides: str) -> str:
        return load(minimal(tmp_path), list(overrides)).algorithm.named()

    assert named() == "st_ppo"
    assert (
        named("algorithm.preset=ppo", "algorithm.clip_low=0.006") == "ppo with clip_low=0.006 (preset: 0.2)"
    )


@pytest.mark.parametrize("preset", VARIANTS)
def test_a_preset_alone_differs_in_no_field(preset: str, tmp_path: Path) -> None:
    assert load(minimal(tmp_path), [f"algorithm.preset={preset}"]).algorithm.named() == preset


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "model: {path: m}\nupdate: {epochs: 1}\n")
    assert load(path, ["update.epochs=3"]).update.epochs == 3


def test_scientific_notation_without_a_point_is_a_number_in_every_section(tmp_path: Path) -> None:
    fields = ("update.actor.lr", "megatron.init_method_std", "rollout.vllm.x", "model.template_arguments.x")
    assert load(minimal(tmp_path), ["update.actor.lr=1e-6"]).update.actor.lr == 1e-6
    text = "model: {path: m, template_arguments: {x: 2e-2, y: '2e-2'}}\nmegatron: {init_method_std: 2e-2}\n"
    in_file = load(written(tmp_path, text + "rollout: {vllm: {x: [+2.e-2, 1E3, e5]}}\n"))
    assert in_file.megatron == {"init_method_std": 0.02}
    assert in_file.rollout.vllm == {"x": [0.02, 1000.0, "e5"]}
    assert in_file.model.template_arguments == {"x": 0.02, "y": "2e-2"}
    assert load(written(tmp_path, in_file.dump())) == in_file
    overridden = load(minimal(tmp_path), [f"{field}=2e-2" for field in fields])
    assert overridden.megatron == {"init_method_std": 0.02} and overridden.rollout.vllm == {"x": 0.02}
    assert overridden.model.template_arguments == {"x": 0.02}


def test_off_is_read_as_a_word_and_true_as_a_boolean(tmp_path: Path) -> None:
    text = "model: {path: m}\nalgorithm: {correction: off}\nupdate: {actor: {distributed: false}}\n"
    path = written(tmp_path, text)
    config = load(path, ["algorithm.routing_replay=off", "rollout.overlap_tools=False"])
    assert config.algorithm.correction == config.algorithm.routing_replay == "off"
    assert not config.update.actor.distributed and not config.rollout.overlap_tools


def test_a_field_beside_a_preset_overrides_it(tmp_path: Path) -> None:
    s_ppo = load(minimal(tmp_path), ["algorithm.preset=s_ppo"]).algorithm
    assert (s_ppo.segments, s_ppo.correction) == ("token", "logit")
    mixed = load(minimal(tmp_path), ["algorithm.preset=s_ppo", "algorithm.segments=turn"]).algorithm
    assert (mixed.segments, mixed.correction) == ("turn", "logit")


@pytest.mark.parametrize("name", ["kl", "grpo", "gspo", "st_ppo"])
def test_another_preset_replaces_what_a_dumped_configuration_has_from_its_own(
    name: str, tmp_path: Path
) -> None:
    chosen = ["algorithm.clip_high=0.3", "algorithm.kl_coefficient=0"]
    dumped = written(tmp_path, load(minimal(tmp_path), ["algorithm.preset=st_ppo", *chosen]).dump())
    (tmp_path / "new").mkdir()
    expected = load(minimal(tmp_path / "new"), [f"algorithm.preset={name}", *chosen]).algorithm
    assert load(dumped, [f"algorithm.preset={name}"]).algorithm == expected, "what was chosen stays"


def test_an_override_wins_over_the_preset_of_a_later_one(tmp_path: Path) -> None:
    dumped = written(tmp_path, load(minimal(tmp_path), ["algorithm.preset=st_ppo"]).dump())
    mixed = load(dumped, ["algorithm.segments=turn", "algorithm.preset=kl"]).algorithm
    assert (mixed.segments, mixed.correction, mixed.rate) == ("turn", "off", "kl")


@pytest.mark.parametrize("own", ["preset: none", "preset: [1]", "clip_low: 0.1"])
def test_a_preset_that_is_not_known_can_be_replaced(own: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"model: {{path: m}}\nalgorithm: {{{own}}}\n")
    assert load(path, ["algorithm.preset=ppo"]).algorithm.rate == "constant"


@pytest.mark.parametrize("name", ["2026-11-25", "20261125", "7e5", "infinity", "true", "1_000"])
def test_an_override_of_a_text_is_text_although_yaml_reads_another_type(name: str, tmp_path: Path) -> None:
    given = load(minimal(tmp_path), [f"run.name={name}", f"model.path={name}", f"data.train={name}"])
    assert (given.run.name, str(given.model.path), str(given.data.train)) == (name, name, name)
    assert load(minimal(tmp_path), [f'run.name="{name}"']).run.name == name, (
        "quotes of YAML are not part of it"
    )
    assert load(minimal(tmp_path), ["data.train=null"]).data.train is None


def test_the_default_algorithm_is_st_ppo_with_bounds_that_follow_the_length(tmp_path: Path) -> None:
    given = load(minimal(tmp_path)).algorithm
    assert given == AlgorithmConfig() == AlgorithmConfig(preset="st_ppo")
    assert (given.segments, given.correction, given.rate) == ("turn", "logit", "constant")
    assert (given.clip_low, given.clip_high, given.clip_length_power) == (0.2, 0.2, 0.5)


def test_the_papers_form_is_st_ppo_and_eight_settings(tmp_path: Path) -> None:
    paper = load(minimal(tmp_path), ["algorithm.preset=paper"]).algorithm
    st_ppo = load(minimal(tmp_path), ["algorithm.preset=st_ppo"]).algorithm
    changed = {k: v for k, v in paper.model_dump().items() if v != st_ppo.model_dump()[k]}
    assert changed == {
        "preset": "paper",
        "correction": "gradient",
        "correction_apply": "gradient",
        "correction_unit": "mean",
        "correction_strength": 1.0,
        "correction_floor": 0.0,
        "aggregation": "sequence_mean_token_mean",
        "clip_length_power": 0.0,
        "dual_clip": None,
    }


def test_bounds_of_turns_follow_their_length_and_those_of_gspo_do_not() -> None:
    named = {name: AlgorithmConfig(preset=name).clip_length_power for name in VARIANTS}
    assert {name for name, power in named.items() if power != 0.5} == {"gspo", "paper"}
    assert named["gspo"] == named["paper"] == 0


def test_a_product_of_token_ratios_needs_bounds_that_do_not_follow_the_length() -> None:
    given = {"preset": "st_ppo", "pooling": "sum"}
    with pytest.raises(ValueError, match=r"clip_length_power=0\.5 .* set clip_length_power=0"):
        AlgorithmConfig.model_validate(given)
    AlgorithmConfig.model_validate({**given, "clip_length_power": 0})
    AlgorithmConfig.model_validate({**given, "segments": "token"})


WITHOUT = {  # a value of each field that has an effect only with another one, and settings without it
    "correction_apply": ("gradient", {"preset": "ppo"}),
    "correction_strength": (1.0, {"preset": "ppo"}),
    "correction_floor": (0.0, {"preset": "ppo"}),
    "gae_level": ("turn", {"preset": "grpo"}),
    "lam": (0.9, {"preset": "grpo"}),
    "lam_critic": (1.0, {"preset": "grpo"}),
    "lam_length": (1.5, {"preset": "grpo"}),
    "whiten": (False, {"preset": "grpo"}),
    "value_clip": (0.2, {"preset": "grpo"}),
    "gamma": (0.9, {"preset": "grpo"}),
    "mismatch_level": ("turn", {}),
    "mismatch_pooling": ("sum", {}),
    "mismatch_bound": (3.0, {}),
    "mismatch_lower": (0.5, {"mismatch": "truncate"}),
    "rate_kl": (0.1, {}),
    "rate_rise": ("iteration", {}),
    "select_bound": (0.1, {"preset": "sao"}),
    "clip_decision": ("segment", {"preset": "ppo"}),
    "turn_weight": (2.0, {}),
}
LIKE = {"rate": {"preset": "kl"}, "select": {"preset": "dppo"}}  # presets with the other field's value


@pytest.mark.parametrize("names, of, values", ONLY_WITH)
def test_a_field_is_refused_without_the_value_of_another_one_that_it_needs(
    names: str, of: str, values: tuple[str | None, ...]
) -> None:
    for name in names.split():
        value, settings = WITHOUT[name] if of != "lam_length" else (0.9, {"preset": "sao"})
        with pytest.raises(ValueError, match=f"{name}={value} with {of}="):
            AlgorithmConfig.model_validate({**settings, name: value})
        for needed in values:
            other = {"preset": needed} if needed in VARIANTS else LIKE.get(of, {})
            other |= {"kl_in": "reward", "kl_coefficient": 1} if needed == "kl" else {}
            AlgorithmConfig.model_validate({**settings, **other, of: needed, name: value})


def test_fields_that_have_an_effect_are_not_refused() -> None:
    """The unit of the norms that are reported; the bounds of cispo beside a selection."""
    AlgorithmConfig.model_validate({"preset": "ppo", "correction_unit": "sum", "correction_probe": True})
    AlgorithmConfig.model_validate({"preset": "cispo", "select": "probability", "clip_high": 3.0})


@pytest.mark.parametrize("name", VARIANTS)
def test_a_preset_equals_its_fields_set_one_by_one(name: str, tmp_path: Path) -> None:
    """The fields of a preset, set one by one on top of another preset, give the same algorithm."""
    parts = [
        f"algorithm.{field}={'null' if value is None else value}" for field, value in VARIANTS[name].items()
    ]
    by_name, by_parts = (
        load(minimal(tmp_path), given)
        for given in ([f"algorithm.preset={name}"], ["algorithm.preset=turn_ppo", *parts])
    )
    assert by_parts.algorithm.model_dump() | {"preset": name} == by_name.algorithm.model_dump()
    assert VARIANTS[name].keys() >= {"segments", "correction", "rate", "advantage"}
    assert by_name.needs_critic == (VARIANTS[name]["advantage"] == "gae")


def test_the_context_holds_the_prompt_and_every_turn_with_its_observation() -> None:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "environment": {"max_turns": 3, "max_observation_tokens": 96},
            "rollout": {"max_prompt_tokens": 96, "max_turn_tokens": 32},
        }
    )
    assert config.max_context == 96 + 4 * (32 + 96)  # three turns and the last generation


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("update.epoch=2", ["update.epoch=2", "no such field", "did you mean update.epochs?"]),
        ("updat.epochs=2", ["updat=", "no such field", "did you mean update?"]),
        ("update.actor.wamup_fraction=1", ["did you mean update.actor.warmup_fraction?"]),
        ("update.actor.x=1", ["update.actor.x=1", "no such field; known here: betas, distributed,"]),
        ("update.epochs=0", ["update.epochs=0", "greater than or equal to 1"]),
        ("algorithm.segments=word", ["algorithm.segments='word'", "'token', 'turn' or 'sequence'"]),
        ("algorithm.preset=stppo", ["preset='stppo'", "did you mean 'st_ppo'?"]),
        ("algorithm.aggregation=sequence_mean_token_sum_norm", ["aggregation_length=None", "needs a length"]),
        ("algorithm.aggregation_length=9", ["aggregation_length=9", "the other aggregations take none"]),
        ("algorithm.rate=open_loop", ["rate_profile=None", "needs a factor for each optimizer step"]),
        ("algorithm={rate: kl, rate_profile: [1, 0.5]}", ["rate_profile=[1.0, 0.5]", "give null"]),
        ("algorithm={preset: grpo, gae_observations: true}", ["advantage='group'", "choose 'gae'"]),
        ("algorithm.turn_weight=2", ["turn_weight=2.0 with advantage='gae'", "set advantage=gigpo"]),
        (
            "algorithm={preset: sao, lam: 0.9}",
            ["lam=0.9 with lam_length=1.5", "leave it out, or set lam_length=null"],
        ),
        (
            "algorithm={preset: dppo, clip_low: 0.1}",
            ["clip_low=0.1 with select='probability'", "leave it out"],
        ),
        ("algorithm={loss: 'm:f', correction: off, clip_high: 0.1}", ["clip_high=0.1 with loss=m:f"]),
        ("algorithm={preset: grpo, truncated: bootstrap}", ["truncated='bootstrap' with advantage='group'"]),
        ("algorithm={kl_estimator: k2}", ["kl_estimator='k2' in the reward", "choose k1, or kl_in=loss"]),
        ("algorithm={preset: distil, kl_estimator: k3}", ["kl_estimator='k3' in the reward"]),
        ("algorithm.mismatch_lower=0.5", ["mismatch_lower=0.5 with mismatch='off'", "set mismatch=mask"]),
        ("algorithm.overlong_from=9", ["overlong_from=9, overlong_to=None", "give both"]),
        ("algorithm={overlong_from: 9, overlong_to: 9}", ["overlong_to=9", "the second above the first"]),
        ("algorithm.rate_rise=iteration", ["rate_rise=iteration with rate='constant'", "set rate=kl"]),
        (
            "algorithm={preset: distil, overlong_from: 2, overlong_to: 6}",
            ["overlong_from=2 with advantage=kl", "leave it out"],
        ),
        ("algorithm.overlong_penalty=2", ["overlong_penalty=2.0", "or leave out all three"]),
        ("algorithm={gae_level: turn, gae_observations: true}", ["gae_level='turn'", "and 'token'"]),
        ("deadlines.rollout=1e9", ["deadlines.rollout=1000000000.0", "less than or equal to 10000000"]),
        ("run.name=../elsewhere", ["run.name='../elsewhere'", "is not a name; give"]),
        (
            "update.actor.betas=0.9",
            ["update.actor.betas=0.9: is not a list; give one, such as [FIRST, SECOND]"],
        ),
        ("environment.command=ls", ["environment.command='ls': is not a list; give one, such as [FIRST,"]),
        # one line, not one for each value that is missing
        (
            "update.actor.betas=[]",
            ["update.actor.betas=[]: has too few values; give all, such as [FIRST, SEC"],
        ),
        ("telemetry.profile=[1]", ["telemetry.profile=[1]: has too few values; give all, such as [FIRST,"]),
        ("telemetry.profile=[1,2,3]", ["telemetry.profile=[1, 2, 3]: has too many values; give fewer,"]),
        ("run=x", ["run='x': is not a section; give one of its fields, such as {name: value}"]),
        ("run.name='a b'", ["run.name='a b': is not a name; give 1 to 64 letters, digits,"]),
        ("update.epochs", ["update.epochs", "section.field=value"]),
        ("run.name.x=1", ["run.name", "'name' is a value, not a section"]),
    ],
)
def test_an_error_names_field_value_and_remedy(override: str, parts: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, "model: {path: m}\nrun: {name: r}\n")
    with pytest.raises(ConfigError) as raised:
        load(path, [override])
    assert len(str(raised.value).splitlines()) == 1
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- 1\n", "holds list"),
        ("a: [1\n", "is not YAML"),
        ("{}\n", "model: missing"),
        ("algorithm: {preset: [1]}\n", r"algorithm: preset=\[1\] is not known; choose from "),
        ("run: {name: 2026-11-25}\n", r"^run.name=.*2026.*: is not text; give text, in the file in quotes\n"),
        ("", r"is empty, and must have sections; see examples/"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(text: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=part):
        load(written(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


def test_every_field_has_a_description() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert "|  |" not in page


def test_a_configuration_in_a_runs_folder_is_that_of_the_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be a copy, or may have been moved: the run that it was made from is not its own."""
    original, copy = tmp_path / "runs" / "a", tmp_path / "kept" / "b"
    text = minimal(tmp_path).read_text() + f"run: {{root: {original.parent}, name: a, seed: 7}}\n"
    files = ("config.yaml", "configs/attempt-1.yaml", "serving/config.yaml")
    for folder in (original, copy):
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        for file in files:
            assert load(folder / file).run.folder == folder
            assert load(folder / file).run.seed == 7
    assert load(copy / "config.yaml", ["run.name=c"]).run.folder == copy.with_name("c")
    assert load(copy / "config.yaml", [f"run.root={original.parent}", "run.name=a"]).run.folder == original
    monkeypatch.chdir(copy)
    assert load(Path("config.yaml")).run.folder == copy
    (copy / "config.yaml").write_text(text.replace("name: a", 'name: "\\0"'))
    assert load(copy / "config.yaml").run.folder == copy
    (copy / "config.yaml").write_text("run: 3")
    with pytest.raises(ConfigError, match="run=3: is not a section"):
        load(copy / "config.yaml")
    own = tmp_path / "configs" / "attempt-baseline.yaml"  # of a project, not of a run
    own.parent.mkdir()
    own.write_text(text)
    assert load(own).run.folder == original
    (link := tmp_path / "runs" / "newest").symlink_to("a")
    assert load(link / "config.yaml").run.folder == original


def test_a_configuration_beside_checkpoints_that_may_be_of_another_run_is_refused(tmp_path: Path) -> None:
    path = minimal(tmp_path)
    load(path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "LATEST").touch()
    with pytest.raises(ConfigError) as raised:
        load(path)
    given = [f"run.root={tmp_path.parent}", f"run.name={tmp_path.name}"]
    assert f"its run is runs/run; give {' '.join(given)} for the run" in str(raised.value)
    assert load(path, given).run.folder == tmp_path
    assert load(path, ["run.name=run"]).run.folder == Path("runs/run")
    assert load(path, ["run.root=other"]).run.folder == Path("other/run")
