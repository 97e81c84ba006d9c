"""Every row of the table in docs/settings.md has tests that hold what it says; they are named here."""

from __future__ import annotations

from pathlib import Path

from tests.test_field_cases import names

TABLE = Path(__file__).parents[1] / "docs" / "settings.md"

KIND = "test_all_exact_is_stock_lightning test_pt110832_one_exact_micro_batch_is_right_on_average_over_all_draws"
TESTS = {
    "32, 64-true, bf16-true, bf16-mixed": "test_double_precision_equals_stock_to_double_rounding "
    "test_bf16_true_is_as_close_to_stock_as_bf16_rounds test_bf16_mixed_is_as_close_to_stock_as_bf16_rounds",
    "16-mixed": "test_pl4151_float16_equals_float32_where_gradients_underflow_without_the_scale "
    "test_float16_estimates_average_to_the_exact_gradient test_pl18828_a_skipped_step_is_waste_and_teaches_nothing",
    "fused optimizers": "test_pl15501_a_fused_adamw_that_unscales_inside_its_step",
    "`accumulate_grad_batches`": "test_pl19987_a_growing_accumulation_window_equals_stock "
    "test_pl19987_ragged_window_uses_lightnings_divisor test_pl21808_an_epoch_shorter_than_the_window_closes_it",
    "clipping": "test_pl18669_clipping_sees_the_estimate test_pl18669_clipping_sees_the_corrected_gradient",
    "`max_time`": "test_lengths_and_limits_equal_stock test_max_time_ends_with_the_step_in_which_it_is_over "
    "test_early_stopping_on_the_validation_loss test_fast_dev_run_leaves_no_file",
    "`detect_anomaly`": "test_a_setting_equals_stock",
    "a training step that returns None": "test_pl5243_a_skipped_batch_leaves_nothing_behind "
    "test_pl5243_training_step_none_injects_nothing",
    "iterable datasets": "test_an_iterable_dataset test_a_batch_that_is_none_costs_nothing",
    "`CombinedLoader`": "test_loaders_equal_stock test_loaders_average_to_the_exact_gradient "
    "test_loaders_whose_batches_differ_in_length_are_refused_by_name",
    "several validation loaders": "test_several_validation_loaders",
    "`BackboneFinetuning`": "test_pt139476_unfreezing_averages_to_the_exact_gradient "
    "test_pt139476_freezing_by_hand_mid_run",
    "adapters (PEFT)": "test_adapters_train_as_in_stock test_an_adapters_estimates_average_to_the_exact_gradient "
    "test_frozen_weights_are_priced_as_such",
    "`WeightAveraging`": "test_averaged_weights_equal_stock "
    "test_under_averaging_estimates_average_to_the_exact_gradient",
    "`torch.compile`": "test_a_compiled_submodule_averages_to_the_exact_gradient "
    "test_pl20233_a_module_compiled_as_a_whole_keeps_its_keys",
    "`LearningRateFinder`": "test_a_finder_finds_and_trains_as_in_stock test_the_ledger_alone_meters_a_finder",
    "convolutions": KIND,
    "LSTM, GRU, RNN": KIND,
    "attention": KIND + " test_attention_with_unequal_head_sizes",
    "embeddings": KIND + " test_pt4829_sparse_embeddings_are_refused_by_parameter_name",
    "Fourier layers": KIND + " test_complex_parameters_are_refused_by_name",
    "buffers": "test_pt99662_buffers_are_inputs_that_a_program_leaves_unchanged "
    "test_pt96136_buffers_are_what_the_exact_passes_alone_leave",
    "spectral norm": KIND + " test_pt66363_spectral_norm_takes_one_power_iteration_a_batch",
    "gradient penalties": KIND + " test_pt91469_gradient_penalty_is_differentiated_twice",
    "BatchNorm, frozen": KIND + " test_opacus319_the_ways_out_are_stock_lightning",
    "BatchNorm in training mode": "test_opacus319_batchnorm_is_refused_with_its_path_and_three_ways_out "
    "test_opacus319_allowed_batchnorm_normalises_each_micro_batch_by_itself",
    "losses that compare samples": "test_simclr13_losses_that_compare_samples_are_refused_with_their_numbers",
    "state that a training step carries": "test_state_carried_from_batch_to_batch_is_refused "
    "test_what_counts_batches_in_their_hook_is_as_in_stock_lightning",
    "GANs": "test_pl17958_the_ledger_counts_a_gans_batches_and_not_its_optimizers_steps "
    "test_pl17281_a_gan_is_refused_with_the_way_out",
    "DDP": "test_two_ranks_all_exact_are_one_process_and_stock_ddp "
    "test_the_estimate_is_unbiased_over_both_ranks_draws test_totals_are_sums_over_ranks",
    "FSDP2": "test_two_shards_are_one_process_and_stock_fsdp test_the_estimate_is_one_processs_and_unbiased "
    "test_the_ledger_counts_both_shards",
    "DeepSpeed": "test_deepspeed2329_another_strategy_is_refused_with_the_one_that_fits",
    "hooks that read gradients": "test_hooks_see_the_gradients_that_they_see_in_stock",
    "CSV, TensorBoard, MLflow, W&B": "test_tensorboard_has_every_value test_mlflow_has_every_value "
    "test_several_loggers_get_the_same_rows test_one_row_per_optimizer_step_holds_the_users_loss_and_every_key",
    "checkpoints": "test_pl17415_a_checkpoint_differs_from_stock_in_the_callbacks_alone "
    "test_a_run_continues_across_the_plug_in_as_if_nothing_had_changed",
}
UNTESTED = ("Comet, Neptune",)  # which the table says


def rows() -> list[str]:
    """The settings of the first table, without its headings and groups."""
    table = TABLE.read_text().split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [row[0] for row in cells if not row[0].startswith("**") and row[0] != "setting"]


def test_each_row_of_the_table_has_its_tests() -> None:
    found = rows()
    assert len(found) > 30
    for row in found:
        keys = [key for key in (*TESTS, *UNTESTED) if row.startswith(key)]
        assert keys, f"no test is named for {row!r}"
    for key in (*TESTS, *UNTESTED):
        assert any(row.startswith(key) for row in found), f"{key!r} is no row of the table"


def test_the_tests_named_for_the_table_exist() -> None:
    known = names()
    missing = {name for listed in TESTS.values() for name in listed.split() if name not in known}
    assert not missing
