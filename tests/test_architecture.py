from memadvisor.architecture import Architecture, Experts, LatentAttention


def shape(**changes):
    fields = {
        "name": "x", "n_layers": 2, "hidden": 8, "n_heads": 2, "n_kv_heads": 2, "head_dim": 4, "ffn": 32, "vocab": 10,
        "tied_embeddings": True, "gated_mlp": False,
    }  # fmt: skip
    return Architecture(**{**fields, **changes})


def test_a_gpt_has_the_parameters_of_its_matrices_biases_and_norms():
    gpt2 = shape(
        n_layers=12, hidden=768, n_heads=12, n_kv_heads=12, head_dim=64, ffn=3072, vocab=50257,
        positions=1024, biases=True, norm_vectors=2,
    )  # fmt: skip
    assert gpt2.num_parameters() == 124_439_808  # as Hugging Face counts gpt2


def test_llama_8b():
    llama = shape(
        n_layers=32, hidden=4096, n_heads=32, n_kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
        gated_mlp=True, tied_embeddings=False,
    )  # fmt: skip
    assert llama.num_parameters() == 8_030_261_248


def test_mixtral_counts_all_experts_and_the_active_ones():
    mixtral = shape(
        n_layers=32, hidden=4096, n_heads=32, n_kv_heads=8, head_dim=128, ffn=14336, vocab=32000,
        gated_mlp=True, tied_embeddings=False,
        experts=Experts(num_experts=8, experts_per_token=2, expert_ffn=14336),
    )  # fmt: skip
    assert mixtral.num_parameters() == 46_702_792_704
    assert mixtral.active_parameters() == 12_879_925_248


def test_deepseek_v3_counts_latent_attention_and_shared_experts():
    deepseek = shape(
        n_layers=61, hidden=7168, n_heads=128, n_kv_heads=128, head_dim=192, ffn=18432, vocab=129280,
        gated_mlp=True, tied_embeddings=False,
        experts=Experts(num_experts=256, experts_per_token=8, expert_ffn=2048, shared_ffn=2048, first_dense=3),
        latent=LatentAttention(kv_rank=512, q_rank=1536, rope_head_dim=64, nope_head_dim=128, value_head_dim=128),
    )  # fmt: skip
    assert (
        deepseek.num_parameters() == 671_026_404_352
    )  # without the router's bias and the extra layer of MTP


def test_each_second_layer_has_experts_and_the_others_none():
    experts = Experts(num_experts=4, experts_per_token=1, expert_ffn=16, first_dense=1, every=2)
    mixed = shape(n_layers=5, experts=experts)

    assert [mixed.has_experts(layer) for layer in range(5)] == [False, True, False, True, False]
    assert [count for count, _ in mixed.kinds().values()] == [3, 2]
    # Two of its layers have a router and four blocks of 2 x 8 x 16 in place of one of 2 x 8 x 32.
    assert mixed.num_parameters() - shape(n_layers=5).num_parameters() == 2 * (4 * 8 + 4 * 256 - 512)


def test_windows_make_two_kinds_of_layers_of_as_many_parameters():
    model = shape(n_layers=6, window=128, full_every=3)

    assert [model.window_of(layer) for layer in range(6)] == [128, 128, 0, 128, 128, 0]
    assert sorted(count for count, _ in model.kinds().values()) == [2, 4]
    assert model.num_parameters() == shape(n_layers=6).num_parameters()
