"""Networks of transformers, whole in one process: where they come from, and which cannot be cut."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unirun.errors import CheckpointDamaged, SpecError, UsageError
from unirun.experiments import (
    GenerationConfig,
    MicroBatchSpec,
    Model,
    ModelName,
    Place,
    SequenceSample,
    topology,
)
from unirun.experiments.algorithms import model_logprobs
from unirun.experiments.models.api import FinetuneSpec, load_whole, save_whole
from unirun.experiments.models.backends import InferenceBackend, TrainBackend, causal_lm
from unirun.experiments.models.stage import Stage, network_faults

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
SPEC = FinetuneSpec(1, 8, 8)


def place(seed: int = 1, **layout: Any) -> Place:
    return Place(ModelName("actor"), topology(**layout), 0, torch.device("cpu"), seed=seed)


def tokens() -> SequenceSample:
    return SequenceSample.of({"tokens": [torch.tensor([3, 1, 4]), torch.tensor([1, 5])]}, ["a", "b"])


def outputs(stage: Stage) -> torch.Tensor:
    engine = InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()
    found = engine.forward(tokens(), "tokens", MicroBatchSpec())
    assert found is not None
    return found


class TestWhereItComesFrom:
    def test_a_new_network_follows_from_the_seed_of_its_place(self) -> None:
        one, same, other = (outputs(causal_lm(place(seed), config=CONFIG)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)

    def test_making_one_leaves_the_random_numbers_of_the_program_as_they_are(self) -> None:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        causal_lm(place(), config=CONFIG)
        assert torch.equal(torch.rand(3), expected)

    @pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
    def test_a_directory_of_transformers_gives_what_transformers_computes(
        self, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
        network: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(kind, **settings)
        )
        network.save_pretrained(tmp_path)
        capfd.readouterr()
        found = outputs(causal_lm(place(), path=str(tmp_path)))
        assert capfd.readouterr().err == "", "no rank draws a progress bar"
        with torch.no_grad():
            expected = [network(each[None]).logits[0] for each in tokens().sequences("tokens")]
        torch.testing.assert_close(found, torch.cat(expected))

    def test_a_critic_has_one_value_for_each_token_and_the_body_of_saved_weights(
        self, tmp_path: Path
    ) -> None:
        actor = causal_lm(place(), config=CONFIG)
        save_whole(TrainBackend().initialize(Model(place(), actor, None), SPEC), tmp_path)
        critic = causal_lm(place(2), config=CONFIG, critic=True, weights=str(tmp_path))
        assert outputs(critic).shape == (5,)
        own, others = critic.body.state_dict(), actor.body.state_dict()
        assert all(torch.equal(own[name], tensor) for name, tensor in others.items())

    @pytest.mark.parametrize("kind", ["llama", "qwen2"])
    def test_a_saved_critic_is_a_classifier_of_transformers_with_one_label(
        self, kind: str, tmp_path: Path
    ) -> None:
        from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

        config = {**CONFIG, "model_type": kind}
        stage = causal_lm(place(), config=config, critic=True)
        save_whole(TrainBackend().initialize(Model(place(), stage, None), SPEC), tmp_path)
        found: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
        network, told = found
        assert not any(told.values())
        ours = outputs(stage).split([3, 2])
        rows = [each[None] for each in tokens().sequences("tokens")]
        with torch.no_grad():
            ends = [network(row).logits[0] for row in rows]
            # Its last layer has a bias, of which the directory has none: it is 0.
            each: Any = AutoModelForTokenClassification.from_pretrained(tmp_path)
            values = [each.eval()(row).logits[0, :, 0] for row in rows]
        torch.testing.assert_close(torch.cat(ends), torch.stack([one[-1] for one in ours]))
        torch.testing.assert_close(torch.cat(values), torch.cat(ours))
        # A critic goes on from it.
        for given in ({"config": config, "weights": str(tmp_path)}, {"path": str(tmp_path)}):
            again = causal_lm(place(7), critic=True, **given)
            assert torch.equal(outputs(again), torch.cat(ours))
        with pytest.raises(SpecError, match="gives a score, and no logits of words; add critic=True"):
            causal_lm(place(), path=str(tmp_path))

    def test_a_classifier_with_several_labels_is_no_critic(self, tmp_path: Path) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
        network: Any = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model("llama", num_labels=3, **settings)
        )
        network.save_pretrained(tmp_path)
        with pytest.raises(SpecError, match=r"no file of safetensors there has 'score.weight' with one row"):
            causal_lm(place(), path=str(tmp_path), critic=True)

    def test_a_critic_whose_family_has_no_such_classifier_is_saved_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none(config: object) -> None:
            raise ValueError("Unrecognized configuration class")

        monkeypatch.setattr("transformers.AutoModelForSequenceClassification.from_config", none)
        stage = causal_lm(place(), config=CONFIG, critic=True)
        save_whole(InferenceBackend().initialize(Model(place(), stage, None), SPEC), tmp_path)
        assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape == (1, 16)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]

    @pytest.mark.parametrize("kind", ["llama", "qwen2"])
    def test_a_saved_model_is_a_directory_of_transformers(self, kind: str, tmp_path: Path) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

        words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
        make: Any = PreTrainedTokenizerFast
        tokenizer = make(tokenizer_object=words, eos_token="b")
        # It was saved in another type than that in which it is trained.
        config = {**CONFIG, "model_type": kind, "tie_word_embeddings": True, "dtype": "bfloat16"}
        stage = causal_lm(place(), config=config)
        save_whole(InferenceBackend().initialize(Model(place(), stage, tokenizer), SPEC), tmp_path)
        found: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        network, told = found
        assert not any(told.values())
        with torch.no_grad():
            expected = [network(each[None]).logits[0] for each in tokens().sequences("tokens")]
        torch.testing.assert_close(outputs(stage), torch.cat(expected))
        assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "b"
        settings = json.loads((tmp_path / "config.json").read_text())
        assert settings["architectures"] == [type(network).__name__]
        assert settings["dtype"] == "float32"
        assert settings["num_hidden_layers"] == CONFIG["num_hidden_layers"]

    def test_saved_parameters_are_loaded_into_another_network(self, tmp_path: Path) -> None:
        one, other = (
            InferenceBackend().initialize(Model(place(), causal_lm(place(seed), config=CONFIG), None), SPEC)
            for seed in (1, 2)
        )
        save_whole(one, tmp_path)
        load_whole(other, tmp_path)
        found = [each.running().forward(tokens(), "tokens", MicroBatchSpec()) for each in (one, other)]
        assert found[0] is not None
        assert found[1] is not None
        assert torch.equal(found[0], found[1])


def test_each_stage_has_the_kinds_of_attention_of_its_layers() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    settings = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 2, "layer_types": kinds}
    for rank in range(2):
        where = Place(ModelName("actor"), topology(pipe=2), rank, torch.device("cpu"))
        stage = causal_lm(where, config={**CONFIG, "model_type": "qwen2", **settings})
        assert stage.config.layer_types == kinds[2 * rank : 2 * rank + 2]


def test_answers_become_a_sample_whose_probabilities_a_forward_pass_gives_again() -> None:
    model = InferenceBackend().initialize(Model(place(), causal_lm(place(), config=CONFIG), None), SPEC)
    prompts = SequenceSample.of(
        {"packed_prompts": [torch.tensor([3, 1, 4]), torch.tensor([1, 5])]}, ["a", "b"], row=[{}, {}]
    )
    how, spec = GenerationConfig(n=2, max_new_tokens=5), MicroBatchSpec()
    made = model.running().generate(prompts, "packed_prompts", spec, how, seed=3)
    assert made is not None
    sample = made.after(prompts)
    assert sample.ids == ("a", "b")
    assert [len(lengths) for lengths in sample.seqlens["packed_input_ids"]] == [2, 2]
    again = model_logprobs(model, sample, spec)
    assert again is not None
    mask = sample["prompt_mask"]
    assert mask.sum() == 2 * (3 + 2)
    assert not sample["packed_logprobs"][mask].any()
    torch.testing.assert_close(sample["packed_logprobs"][~mask], again["packed_logprobs"][~mask])
    tokens = sample.sequences("packed_input_ids")
    assert torch.equal(tokens[3], torch.cat([torch.tensor([1, 5]), made.tokens[1][1]]))


class TestWhatCannotBeCut:
    def test_all_reasons_are_told_at_once(self) -> None:
        with pytest.raises(SpecError) as caught:
            causal_lm(place(tensor=3, pipe=3), config=CONFIG)
        told = str(caught.value)
        assert "it has 4 attention heads, and tensor is 3" in told
        assert "it has 2 key-value heads, and tensor is 3" in told
        assert "it has 32 elements in its intermediate layers, and tensor is 3" in told
        assert "it has 2 layers, and pipe is 3" in told
        assert "models.actor@0" in told

    def test_a_network_that_is_not_built_as_llama_is(self) -> None:
        gpt2 = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        with pytest.raises(SpecError, match="gpt2 cannot run: GPT2LMHeadModel is not built as Llama is"):
            causal_lm(place(), config=gpt2)

    @pytest.mark.parametrize("axis", ["pipe", "tensor"])
    def test_a_layout_that_a_family_cannot_have_is_named(self, axis: str) -> None:
        phi = {**CONFIG, "model_type": "phi"}
        with pytest.raises(SpecError, match=f"the family phi cannot run with {axis}=2: .*; use {axis}=1"):
            causal_lm(place(**{axis: 2}), config=phi)

    @pytest.mark.parametrize("wrong", [{"config": {"model_type": "nothing"}}, {"path": "/nowhere/at/all"}])
    def test_a_configuration_that_cannot_be_read(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(SpecError, match="models.actor@0: transformers does not read its configuration"):
            network_faults("models.actor@0", topology(), wrong)

    def test_an_error_of_transformers_without_a_text_is_told_by_its_type(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unreadable(path: str) -> None:
            raise AssertionError

        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreadable)
        with pytest.raises(SpecError, match="does not read its configuration: AssertionError"):
            network_faults("models.actor@0", topology(), {"path": "org/name"})

    @pytest.mark.parametrize(
        ("kind", "scale"), [("cohere", {"logit_scale": 0.25}), ("granite", {"logits_scaling": 2.0})]
    )
    def test_a_network_that_changes_its_logits_at_the_end(self, kind: str, scale: dict[str, float]) -> None:
        with pytest.raises(SpecError, match=f"{kind} cannot run: .*changes its logits after the last layer"):
            causal_lm(place(), config={**CONFIG, "model_type": kind, **scale})

    def test_weights_of_another_network_are_told(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        whole = InferenceBackend().initialize(Model(place(), causal_lm(place(), config=CONFIG), None), SPEC)
        save_whole(whole, tmp_path)
        weights = str(tmp_path)
        causal_lm(place(), config={**CONFIG, "num_hidden_layers": 3}, weights=weights)
        assert (
            f"{weights} has no tensors that fit model.layers.2.input_layernorm.weight"
            in capfd.readouterr().err
        )
        with pytest.raises(UsageError, match="has a name and a shape of actor@0"):
            causal_lm(place(), config={**CONFIG, "hidden_size": 8}, weights=weights)


class TestTraining:
    @pytest.mark.parametrize(
        ("then", "now", "told"),
        [
            ({}, {"num_hidden_layers": 3}, r"2\S*.weight is none in the checkpoint and \[16\] in the model"),
            ({"num_hidden_layers": 3}, {}, r"2\S*.weight is \[16\] in the checkpoint and none in the model"),
            ({}, {"hidden_size": 8}, r"is \[32, 16\] in the checkpoint and \[32, 8\] in the model"),
            # One row would be copied into each row.
            ({"vocab_size": 1}, {}, r"is \[1, 16\] in the checkpoint and \[32, 16\] in the model"),
        ],
    )
    def test_a_checkpoint_of_another_network_is_refused(
        self, then: dict[str, Any], now: dict[str, Any], told: str
    ) -> None:
        def engine(more: dict[str, Any]) -> Any:
            stage = causal_lm(place(), config={**CONFIG, **more})
            return TrainBackend().initialize(Model(place(), stage, None), SPEC).running()

        with pytest.raises(UsageError, match=f"actor@0 has other parameters than its rank 0: .*{told}"):
            engine(now).load_state(engine(then).state())

    def test_a_checkpoint_that_was_cut_is_damaged(self, tmp_path: Path) -> None:
        model = TrainBackend().initialize(Model(place(), causal_lm(place(), config=CONFIG), None), SPEC)
        backend = TrainBackend()
        backend.save(model, tmp_path)
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(CheckpointDamaged, match="00000.pt cannot be read"):
            backend.load(model, tmp_path)

    def test_a_call_without_sequences_gives_nothing_of_the_right_shape(self) -> None:
        stage = causal_lm(place(), config=CONFIG)
        engine = InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()
        found = engine.forward(tokens().reorder([]), "tokens", MicroBatchSpec())
        assert found is not None
        assert found.shape == (0, CONFIG["vocab_size"])

    def test_state_that_is_loaded_goes_on_as_if_it_had_not_been_saved(self) -> None:
        def engine() -> Any:
            return (
                TrainBackend(lr=1e-2)
                .initialize(Model(place(), causal_lm(place(), config=CONFIG), None), SPEC)
                .running()
            )

        def step(engine: Any) -> float:
            def loss(logits: Tensor, part: object) -> tuple[Tensor, dict[str, float]]:
                return logits.float().logsumexp(-1).sum(), {}

            return float(engine.train_batch(tokens(), "tokens", MicroBatchSpec(2), loss, len)["loss"])

        one, other = engine(), engine()
        step(one)
        other.load_state(deepcopy(one.state()))
        assert [step(one) for _ in range(3)] == [step(other) for _ in range(3)]

    def test_parameters_come_back_from_the_host_and_those_that_were_dropped_have_memory_again(self) -> None:
        stage = causal_lm(place(), config=CONFIG)
        engine = InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()
        before = outputs(stage)
        values = {name: tensor.clone() for name, tensor in engine.tensors().items()}
        engine.offload(keep=True)
        engine.fetch()
        assert torch.equal(outputs(stage), before)
        shapes = {name: tensor.shape for name, tensor in engine.tensors().items()}
        sent = {name: tensor.numpy() for name, tensor in engine.tensors().items()}
        engine.offload(keep=False)
        assert {tensor.untyped_storage().nbytes() for tensor in engine.tensors().values()} == {0}
        engine.fetch()
        # What is still on its way to others has not changed.
        assert all(torch.equal(torch.from_numpy(sent[name]), values[name]) for name in values)
        assert {name: tensor.shape for name, tensor in engine.tensors().items()} == shapes

    def test_tied_embeddings_come_back_too(self) -> None:
        stage = causal_lm(place(), config={**CONFIG, "tie_word_embeddings": True})
        engine = InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()
        shapes = {name: tensor.shape for name, tensor in engine.tensors().items()}
        engine.offload(keep=False)
        engine.fetch()
        assert {name: tensor.shape for name, tensor in engine.tensors().items()} == shapes
        assert stage.head.weight is stage.body.embed_tokens.weight

    def test_values_are_those_that_were_given(self) -> None:
        stage = causal_lm(place(), config=CONFIG)
        engine = InferenceBackend().initialize(Model(place(), stage, None), SPEC).running()
        before, values = outputs(stage), {name: tensor.clone() for name, tensor in engine.tensors().items()}
        engine.offload(keep=False)
        engine.fetch()
        for name, tensor in engine.tensors().items():
            tensor.copy_(values[name])
        assert torch.equal(outputs(stage), before)


def test_the_last_layer_of_a_critic_is_its_own_though_words_have_one_with_their_embeddings(
    tmp_path: Path,
) -> None:
    tied: dict[str, Any] = {**CONFIG, "tie_word_embeddings": True}
    for critic in (False, True):
        stage = causal_lm(place(), config=tied, critic=critic)
        (tmp_path / str(critic)).mkdir()
        stage.describe(tmp_path / str(critic))
        told = json.loads((tmp_path / str(critic) / "config.json").read_text())["tie_word_embeddings"]
        assert told is stage.config.tie_word_embeddings is not critic
        weights = stage.head.weight, stage.body.embed_tokens.weight
        assert (weights[0] is weights[1]) is not critic
