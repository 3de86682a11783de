"""The public names and their sources: the one place where the API of Accelerate 1.x meets this code.

Every public module (``accelerate.state``, ``accelerate.utils.modeling``, ...) is two lines over this table,
and everything is loaded when it is first used. ``core/lazy_names.py`` explains the kinds of sources, and
``tests/support/pyi_stub_writer.py`` writes the ``.pyi`` files that show the same names to type checkers.
"""

from __future__ import annotations

from accelerate.core.lazy_names import (
    PARTIAL_REEXPORTS,
    LazyCall,
    NameSource,
    PublicNames,
    all_names,
    constants,
    device_checks,
    device_requirements,
    exports,
    package_checks,
    package_requirements,
    words,
)

NAME_SOURCES: dict[str, dict[str, NameSource]] = {
    "accelerate": {},
    "accelerate.accelerator": exports("facade.accelerator: Accelerator torch"),
    "accelerate.big_modeling": exports("offload.hooks: attach_layerwise_casting_hooks")
    | exports("offload.dispatch: cpu_offload cpu_offload_with_hook disk_offload dispatch_model")
    | exports("offload.empty_init: init_empty_weights init_on_device")
    | exports("facade.big_model_loading: load_checkpoint_and_dispatch"),
    "accelerate.checkpointing": exports(
        "checkpoint.accelerator_state: load_accelerator_state load_custom_state load_model "
        "save_accelerator_state save_custom_state"
    ),
    "accelerate.data_loader": exports("data.loader: DataLoaderAdapter DataLoaderShard")
    | {"_PYTORCH_DATALOADER_KWARGS": LazyCall("data.prepare:default_loader_options")}
    | exports("data.active_loaders: DataLoaderStateMixin")
    | exports("data.prepare: prepare_data_loader BatchSampler DataLoader IterableDataset RandomSampler")
    | exports("data.dispatch: DataLoaderDispatcher")
    | exports("data.batch_sampler_shard: BatchSamplerShard")
    | exports("data.skip_first_batches: SkipBatchSampler SkipDataLoader skip_first_batches")
    | exports("data.sample_order: SeedableRandomSampler")
    | exports("data.epoch_order: get_sampler")
    | exports("data.iterable_dataset: IterableDatasetShard"),
    "accelerate.hooks": exports(
        "offload.hooks: LayerwiseCastingHook ModelHook SequentialHook _accelerate_added_attributes "
        "add_hook_to_module remove_hook_from_module remove_hook_from_submodules"
    )
    | exports(
        "offload.align_hook: AlignDevicesHook attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook"
    )
    | exports("offload.dispatch: CpuOffload UserCpuOffloadHook")
    | exports("offload.offloaded_tensor: _compiler_disable"),
    "accelerate.inference": exports(
        "offload.pipeline.prepare_pippy: build_pipeline find_pippy_batch_size generate_device_map "
        "pippy_forward prepare_pippy"
    ),
    "accelerate.launchers": exports(
        "launch.notebook.launchers: debug_launcher notebook_launcher test_launch"
    ),
    "accelerate.ray": exports("launch.ray_job: launch"),
    "accelerate.local_sgd": exports("outer.local_training: DiLoCo LocalSGD"),
    "accelerate.logging": exports("watch.console: MultiProcessAdapter get_logger"),
    "accelerate.memory_utils": {},
    "accelerate.optimizer": exports(
        "facade.optimizer: AcceleratedOptimizer move_to_device patch_optimizer_step"
    ),
    "accelerate.parallelism_config": exports("strategy.parallelism.config: ParallelismConfig"),
    "accelerate.scheduler": exports("facade.scheduler: AcceleratedScheduler"),
    "accelerate.state": exports(
        "facade.state: AcceleratorState GradientState PartialState ThreadLocalSharedDict do_nothing "
        "is_initialized"
    ),
    "accelerate.tracking": exports("track: register_tracker_class")
    | exports("track.aim: AimTracker")
    | exports("track.base: GeneralTracker on_main_process")
    | exports("track.clearml: ClearMLTracker")
    | exports("track.comet_ml: CometMLTracker")
    | exports("track.dvclive: DVCLiveTracker")
    | exports("track.jsonl: JSONLTracker")
    | exports("track.mlflow: MLflowTracker")
    | exports("track.swanlab: SwanLabTracker")
    | exports("track.tensorboard: TensorBoardTracker")
    | exports("track.trackio: TrackioTracker")
    | exports("track.wandb: WandBTracker")
    | exports("facade.tracker_set: filter_trackers get_available_trackers")
    | {"LOGGER_TYPE_TO_CLASS": LazyCall("track:tracker_classes")},
    # --- accelerate.commands
    "accelerate.commands": {},
    "accelerate.commands.accelerate_cli": exports("cli.main: main"),
    "accelerate.commands.config": exports("cli.config: get_config_parser main"),
    "accelerate.commands.config.cluster": exports("cli.wizard.terminal: get_cluster_input"),
    "accelerate.commands.config.config": exports("cli.wizard.terminal: get_user_input")
    | exports("cli.config: config_command config_command_parser description=CONFIG main"),
    "accelerate.commands.config.config_args": {
        **dict.fromkeys(
            words("default_config_file default_json_config_file default_yaml_config_file"),
            LazyCall("launch.config_files:default_file", then=str),
        ),
        "cache_dir": LazyCall("launch.config_files:default_file", then=lambda file: str(file.parent)),
        "hf_cache_home": LazyCall("launch.config_files:default_file", then=lambda file: str(file.parents[1])),
        **exports("cli.config_classes: BaseConfig ClusterConfig SageMakerConfig load_config_from_file"),
    },
    "accelerate.commands.config.config_utils": exports("cli.config: SubcommandHelpFormatter")
    | constants(
        DYNAMO_BACKENDS=words(
            "EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT "
            "AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM"
        )
    ),
    "accelerate.commands.config.default": exports("cli.config_classes: write_basic_config")
    | exports("cli.config: default_command_parser default_config_command description=DEFAULT"),
    "accelerate.commands.config.sagemaker": exports("cli.wizard.terminal: get_sagemaker_input"),
    "accelerate.commands.config.update": exports(
        "cli.config: description=UPDATE update_command_parser update_config update_config_command"
    ),
    "accelerate.commands.env": exports("cli.env: env_command env_command_parser main"),
    "accelerate.commands.estimate": exports(
        "cli.estimate_memory: add_timm_hub_prefix check_has_model create_ascii_table create_empty_model "
        "estimate_command estimate_command_parser estimate_training_usage gather_data main verify_on_hub"
    ),
    "accelerate.commands.launch": exports("cli.launch: main")
    | exports(
        "cli.v1_launcher: CustomHelpFormatter clean_option deepspeed_launcher launch_command "
        "launch_command_parser multi_gpu_launcher options_to_group sagemaker_launcher simple_launcher "
        "tpu_launcher tpu_pod_launcher _validate_launch_command"
    ),
    "accelerate.commands.merge": exports("cli.merge_weights: description main merge_command")
    | exports("cli.merge_weights: merge_command_parser"),
    "accelerate.commands.test": exports("cli.test: main test_command test_command_parser"),
    "accelerate.commands.to_fsdp2": exports(
        "cli.to_fsdp2: ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ConversionStatus convert_config_to_fsdp2 "
        "load_config to_fsdp2_command to_fsdp2_command_parser"
    ),
    "accelerate.commands.tpu": exports("cli.tpu_config: main tpu_command_launcher tpu_command_parser"),
    "accelerate.commands.utils": exports("cli.v1_launcher: CustomArgumentGroup CustomArgumentParser"),
    # --- accelerate.utils
    "accelerate.utils": {},
    "accelerate.utils.ao": exports(
        "precision.float8.torchao: convert_model_to_fp8_ao filter_first_and_last_linear_layers "
        "filter_linear_layers find_first_last_linear_layers has_ao_layers"
    ),
    "accelerate.utils.bnb": exports(
        "offload.quantization.bitsandbytes: get_parameter_device has_4bit_bnb_layers "
        "quantize_and_offload_8bit replace_with_bnb_layers"
    )
    | exports("offload.quantization.base: get_keys_to_not_convert")
    | exports("facade.quantized_loading: get_quantized_model_device_map load_and_quantize_model"),
    "accelerate.utils.constants": exports(
        "checkpoint.layout: MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME "
        "SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME "
        "WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME"
    )
    | exports("watch.profile: PROFILE_PATTERN_NAME")
    | exports("core.packages: STR_OPERATION_TO_FUNC=OPERATIONS")
    | exports("offload.hooks: SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING=CASTABLE_LAYERS")
    | constants(
        "BETA_CP_AVAILABLE_PYTORCH_VERSION=2.6.0 BETA_SP_AVAILABLE_DEEPSPEED_VERSION=0.18.2 "
        "BETA_TP_AVAILABLE_PYTORCH_VERSION=2.3.0 BETA_TP_AVAILABLE_TRANSFORMERS_VERSION=4.52.0 "
        "DTENSOR_PYTORCH_VERSION=2.5.0 ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION=2.2.0 "
        "FSDP_PYTORCH_VERSION=2.1.0.a0+32f93b1 FSDP2_PYTORCH_VERSION=2.6.0 "
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION=2.1.0 XPU_PROFILING_AVAILABLE_PYTORCH_VERSION=2.4.0 "
        "SAGEMAKER_PYTHON_VERSION=py38 SAGEMAKER_PYTORCH_VERSION=1.10.2 "
        "SAGEMAKER_TRANSFORMERS_VERSION=4.17.0 FSDP_MODEL_NAME=pytorch_model_fsdp",
        SAGEMAKER_PARALLEL_EC2_INSTANCES=["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"],
        CUDA_DISTRIBUTED_TYPES=["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"],
        TORCH_DISTRIBUTED_OPERATION_TYPES=["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
        + [f"MULTI_{kind}" for kind in words("NPU MLU SDAA MUSA XPU CPU HPU NEURON")],
        DEEPSPEED_MULTINODE_LAUNCHERS=words("pdsh standard openmpi mvapich mpich nossh slurm"),
        TORCH_DYNAMO_MODES=["default", "reduce-overhead", "max-autotune"],
        FSDP_SHARDING_STRATEGY=words("FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2"),
        FSDP_AUTO_WRAP_POLICY=["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
        FSDP_BACKWARD_PREFETCH=["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
        FSDP_STATE_DICT_TYPE=words("FULL_STATE_DICT LOCAL_STATE_DICT SHARDED_STATE_DICT"),
        FSDP2_STATE_DICT_TYPE=words("SHARDED_STATE_DICT FULL_STATE_DICT"),
        TORCH_LAUNCH_PARAMS=words(
            "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts "
            "monitor_interval start_method role module m no_python run_path log_dir r redirects t tee "
            "node_rank master_addr master_port"
        ),
    ),
    "accelerate.utils.dataclasses": exports(
        "facade.enums: ComputeEnvironment DistributedType FP8BackendType LoggerType "
        "PrecisionType RNGType SageMakerDistributedType"
    )
    | exports("core.value_types: BaseEnum CustomDtype EnumWithContains")
    | exports("core.argument_checks: KwargsHandler")
    | exports("precision.autocast: AutocastKwargs")
    | exports("facade.launch_settings: DynamoBackend")
    | exports("precision.fp16: GradScalerKwargs")
    | exports("strategy.ddp: DDPCommunicationHookType DistributedDataParallelKwargs")
    | exports("world.preemption: PreemptionKwargs")
    | exports("world.world: InitProcessGroupKwargs")
    | exports("world.local_tensor_trees: TensorInformation")
    | exports("data.prepare: DataLoaderConfiguration")
    | exports("facade.gradient_state: GradientAccumulationPlugin")
    | exports("precision.float8.torchao: AORecipeKwargs")
    | exports("precision.fp8: FP8RecipeKwargs MSAMPRecipeKwargs")
    | exports("precision.float8.transformer_engine: TERecipeKwargs")
    | exports("facade.compilation: TorchDynamoPlugin")
    | exports("facade.module_queries: get_module_class_from_name")
    | exports("checkpoint.discovery: ProjectConfiguration")
    | exports("watch.profile: ProfileKwargs")
    | exports("offload.quantization.bitsandbytes: BnbQuantizationConfig")
    | exports("offload.quantization.torchao: TorchAOQuantizationConfig")
    | exports("strategy.deepspeed.plugin: DeepSpeedPlugin")
    | exports("strategy.sharding.plugin: FullyShardedDataParallelPlugin")
    | exports(
        "strategy.parallelism.config: DeepSpeedSequenceParallelConfig PipelineParallelConfig "
        "TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin"
    )
    | exports(
        "strategy.megatron.parsers: MODEL_CONFIGS_TO_MEGATRON_PARSERS add_model_config_to_megatron_parser "
        "parse_bert_config parse_glm4_moe_config parse_gpt2_config parse_llama_config parse_t5_config"
    )
    | exports("strategy.megatron.plugin: MegatronLMPlugin"),
    "accelerate.utils.deepspeed": exports(
        "facade.engine_wrappers: DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper "
        "DeepSpeedSchedulerWrapper get_active_deepspeed_plugin"
    )
    | exports(
        "strategy.deepspeed.config_tree: DummyOptim DummyScheduler HfDeepSpeedConfig "
        "map_pytorch_optim_to_deepspeed"
    ),
    "accelerate.utils.environment": exports(
        "facade.v1_utilities: CPUInformation are_libraries_initialized clear_environment "
        "convert_dict_to_env_variables get_cpu_distributed_information get_current_device_type "
        "get_int_from_env parse_choice_from_env parse_flag_from_env patch_environment "
        "purge_accelerate_environment str_to_bool check_cuda_p2p_ib_support=has_p2p_infiniband "
        "get_driver_version get_gpu_info"
    )
    | exports("facade.device_availability: check_cuda_fp8_capability")
    | exports("world.affinity: override_numa_affinity set_numa_affinity"),
    "accelerate.utils.fsdp_utils": exports(
        "strategy.sharding.fsdp_utils: disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading "
        "ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict "
        "fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters "
        "get_fsdp2_grad_scaler get_parameters_from_modules"
    )
    | exports(
        "facade.fsdp_checkpoint: load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer "
        "_get_model_state_dict=get_model_state_dict _set_model_state_dict=set_model_state_dict "
        "_prepare_sd_options=prepare_sd_options"
    )
    | exports("checkpoint.weight_files: merge_fsdp_weights"),
    "accelerate.utils.imports": package_checks(
        "aim=aim<4 amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer lomo=lomo_optim "
        "matplotlib mlflow msamp pandas peft pippy=torch>=2.4 pynvml pytest sagemaker schedulefree swanlab "
        "timm torchao=torchao>=0.6.1 torchdata torchdata_stateful_dataloader=torchdata>=0.8 torchvision tqdm "
        "trackio transformer_engine transformers triton wandb weights_only=torch>=2.4 "
        "4bit_bnb=bitsandbytes>=0.39.0 8bit_bnb=bitsandbytes>=0.37.2"
    )
    | device_checks("mlu musa neuron npu sdaa xpu")
    | exports(
        "facade.device_availability: is_bf16_available is_bitsandbytes_multi_backend_available "
        "is_cuda_available is_fp16_available is_habana_gaudi1 is_hpu_available is_mps_available "
        "is_rocm_available is_torch_distributed_available is_torch_xla_available "
        "is_transformer_engine_mxfp8_available is_xccl_available"
    )
    | {
        "USE_TORCH_XLA": LazyCall("core.environ:get_flag", "USE_TORCH_XLA", True),
        "deepspeed_required": LazyCall("core.packages:requires", "deepspeed"),
        "torchao_required": LazyCall("core.packages:requires", "torchao"),
        "is_bnb_available": LazyCall("core.packages:make_version_checker", "bitsandbytes"),
        "is_numpy_available": LazyCall("core.packages:make_version_checker", "numpy", "1.25.0"),
        "is_fp8_available": LazyCall(
            "core.packages:make_checker", "transformer_engine", "torchao>=0.6.1", "msamp"
        ),
        "is_tensorboard_available": LazyCall("core.packages:make_checker", "tensorboard", "tensorboardX"),
        "is_rich_available": LazyCall("core.packages:make_checker", "rich", flag="ACCELERATE_ENABLE_RICH"),
        "is_megatron_lm_available": LazyCall(
            "core.packages:make_checker", "megatron.core", flag="ACCELERATE_USE_MEGATRON_LM"
        ),
    },
    "accelerate.utils.launch": exports("launch.notebook.launchers: PrepareForLaunch")
    | exports(
        "cli.v1_launcher: env_var_path_add prepare_deepspeed_cmd_env "
        "prepare_extend_env_parallelism_config prepare_multi_gpu_env prepare_simple_launcher_cmd_env "
        "prepare_tpu setup_fp8_env"
    )
    | exports("launch.kinds.sagemaker: prepare_sagemager_args_inputs"),
    "accelerate.utils.megatron_lm": exports(
        "strategy.megatron.public_functions: MegatronLMDummyDataLoader avg_losses_across_data_parallel_group "
        "finish_mpu_init initialize gather_across_data_parallel_groups model_provider_func "
        "prepare_data_loader prepare_optimizer prepare_model_optimizer_scheduler prepare_scheduler"
    )
    | exports("strategy.megatron.train_step: AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep")
    | exports("strategy.megatron.engine: MegatronEngine")
    | exports("strategy.megatron.engine_factory: MegatronLMDummyScheduler")
    | exports("facade.engine_wrappers: MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper"),
    "accelerate.utils.memory": exports(
        "watch.batch_size_search: clear_device_cache find_executable_batch_size release_memory "
        "should_reduce_batch_size"
    ),
    "accelerate.utils.modeling": exports("facade.module_queries: convert_file_size_to_int is_peft_model")
    | exports(
        "offload.module_sizes: _get_proper_dtype calculate_maximum_sizes check_tied_parameters_in_config "
        "compute_module_sizes compute_module_total_buffer_size dtype_byte_size find_tied_parameters "
        "get_max_layer_size get_module_leaves get_module_size_with_ties get_non_persistent_buffers "
        "named_module_tensors"
    )
    | exports(
        "offload.device_maps: check_device_map check_tied_parameters_on_same_device clean_device_map "
        "fallback_allocate get_balanced_memory get_max_memory infer_auto_device_map"
    )
    | exports("facade.v1_utilities: get_mixed_precision_context_manager")
    | exports("strategy.sharding.fsdp_utils: get_grad_scaler")
    | exports("checkpoint.layout: WEIGHTS_INDEX_NAME")
    | exports("checkpoint.weight_files: load_state_dict id_tensor_storage")
    | exports("facade.big_model_loading: load_checkpoint_in_model")
    | exports(
        "offload.module_tensors: align_module_device check_device_same get_state_dict_from_offload "
        "get_state_dict_offloaded_model has_offloaded_params load_offloaded_weights retie_parameters "
        "set_module_tensor_to_device"
    ),
    "accelerate.utils.offload": exports(
        "offload.offload_folder: OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict "
        "load_offloaded_weight offload_state_dict offload_weight save_offload_index"
    ),
    "accelerate.utils.operations": exports(
        "world.collective: DistributedOperationException broadcast broadcast_object_list chained_operation "
        "copy_tensor_to_devices gather gather_object gather_tensor_shape pad_across_processes reduce "
        "verify_operation _gpu_broadcast=broadcast_from _gpu_gather=gather _gpu_gather_object=gather_object"
    )
    | exports(
        "world.local_tensor_trees: CannotPadNestedTensorWarning ConvertOutputsToFp32 concatenate "
        "convert_outputs_to_fp32 convert_to_fp32 find_batch_size find_device get_data_structure get_shape "
        "honor_type ignorant_find_batch_size initialize_tensors is_namedtuple is_tensor_information "
        "is_torch_tensor listify pad_input_tensors recursively_apply send_to_device slice_tensors"
    )
    | exports("facade.module_queries: TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT")
    | exports("facade.device_availability: is_torch_xpu_tensor")
    | exports("strategy.deepspeed.strategy: GatheredParameters"),
    "accelerate.utils.other": exports(
        "facade.module_queries: extract_model_from_parallel get_model_tp_size get_module_children_bottom_up "
        "has_compiled_regions has_repeated_blocks is_compiled_module is_repeated_blocks model_has_dtensor"
    )
    | exports(
        "facade.compilation: compile_regions compile_regions_fsdp2=compile_regions "
        "compile_regions_deepspeed=compile_regions"
    )
    | exports("facade.v1_utilities: check_os_kernel get_pretty_name merge_dicts recursive_getattr")
    | exports("core.units: convert_bytes")
    | exports("world.network: get_free_port is_port_in_use")
    | exports("world.collective: wait_for_everyone=barrier")
    | exports("checkpoint.weight_files: TORCH_SAFE_GLOBALS clean_state_dict_for_safetensors load save"),
    "accelerate.utils.random": exports("world.rng: set_seed synchronize_rng_state synchronize_rng_states"),
    "accelerate.utils.torch_xla": exports("facade.v1_utilities: install_xla"),
    "accelerate.utils.tqdm": exports("watch.console: tqdm"),
    "accelerate.utils.transformer_engine": exports(
        "precision.float8.transformer_engine: apply_fp8_autowrap contextual_fp8_autocast convert_model "
        "has_transformer_engine_layers"
    ),
    "accelerate.utils.versions": exports("core.packages: compare_versions is_torch_version"),
    "accelerate.test_utils": {},
    "accelerate.test_utils.testing": exports(
        "facade.client_test_utils: AccelerateTestCase MockingTestCase SubprocessCallException "
        "TempDirTestCase are_the_same_tensors assert_exception capture_call_output execute_subprocess_async "
        "get_backend get_launch_command get_torch_dist_unique_port memory_allocated_func "
        "path_in_accelerate_package pytest_xdist_worker_id run_command require_cpu require_fsdp2 "
        "require_huggingface_suite require_multi_device require_non_cpu require_single_device "
        "require_torch_min_version require_tp require_trackers run_first skip slow"
    )
    | package_requirements(
        "aim bnb clearml comet_ml datasets deepspeed dvclive fp16 fp8 import_timer matplotlib mlflow pandas "
        "peft pippy schedulefree swanlab tensorboard timm torchao torchdata_stateful_dataloader torchvision "
        "trackio transformer_engine transformer_engine_mxfp8 transformers triton wandb"
    )
    | device_requirements("", "cuda cuda_or_hpu cuda_or_xpu mlu mps musa neuron npu sdaa tpu=xla xpu")
    | device_requirements("non_", "hpu torch_xla=xla xpu")
    | device_requirements("single_", "gpu=cuda xpu")
    | device_requirements("multi_", "gpu=cuda gpu_or_xpu=cuda_or_xpu xpu")
    | {
        "DEFAULT_LAUNCH_COMMAND": LazyCall("facade.client_test_utils:default_launch_command"),
        "device_count": LazyCall("facade.client_test_utils:count_devices"),
        "torch_device": LazyCall("facade.client_test_utils:find_torch_device"),
    },
    "accelerate.test_utils.training": exports("facade.client_test_model: RegressionDataset RegressionModel"),
}

for _name in words("accelerator checkpointing data_loader tracking utils.fsdp_utils utils.other"):
    _module = f"accelerate.{_name}"
    NAME_SOURCES[_module]["logger"] = LazyCall("watch.console:get_logger", _module)

# Names that modules of 1.x had by import: never promised one by one, so all modules of a kind have the same.
UTILS = " ".join(name.partition(".")[2] for name in NAME_SOURCES if name.startswith("accelerate.utils."))
CONFIG_WRITER = {"accelerate.commands.config.default": "write_basic_config"}
COMMON_NAMES = all_names(f"state logging optimizer scheduler big_modeling hooks {UTILS}") | CONFIG_WRITER
CONFIG_MODULES = "commands.config.config_args commands.config.config_utils"
COMMAND_NAMES = all_names(f"commands.utils {CONFIG_MODULES} {UTILS}")

REEXPORTS: dict[str, dict[str, str]] = {
    **{name: COMMON_NAMES for name in NAME_SOURCES if not name.startswith("accelerate.commands")},
    **{name: COMMAND_NAMES for name in NAME_SOURCES if name.startswith("accelerate.commands.")},
    "accelerate": {
        "accelerate.accelerator": "Accelerator",
        "accelerate.big_modeling": (
            "cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights init_on_device "
            "load_checkpoint_and_dispatch"
        ),
        "accelerate.data_loader": "skip_first_batches",
        "accelerate.inference": "prepare_pippy",
        "accelerate.launchers": "debug_launcher notebook_launcher",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.state": "PartialState",
        "accelerate.utils.dataclasses": (
            "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
            "DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs "
            "InitProcessGroupKwargs ProfileKwargs"
        ),
        "accelerate.utils.imports": "is_rich_available",
        "accelerate.utils.memory": "find_executable_batch_size",
        "accelerate.utils.modeling": "infer_auto_device_map load_checkpoint_in_model",
        "accelerate.utils.random": "synchronize_rng_states",
    },
    "accelerate.accelerator": all_names("data_loader checkpointing tracking parallelism_config")
    | COMMON_NAMES,
    "accelerate.local_sgd": all_names("accelerator utils.dataclasses"),
    "accelerate.commands.accelerate_cli": all_names(
        "commands.utils commands.env commands.estimate commands.config commands.launch commands.merge "
        "commands.test commands.to_fsdp2 commands.tpu"
    ),
    "accelerate.commands.config": all_names(
        f"{CONFIG_MODULES} commands.config.config commands.config.default commands.config.update"
    ),
    "accelerate.commands.config.config": COMMAND_NAMES
    | all_names("commands.config.cluster commands.config.sagemaker"),
    "accelerate.commands.estimate": all_names("big_modeling") | COMMAND_NAMES,
    "accelerate.commands.test": all_names("test_utils.testing") | COMMAND_NAMES,
    "accelerate.test_utils": all_names("test_utils.testing test_utils.training"),
    "accelerate.utils": all_names(f"parallelism_config {UTILS}") | CONFIG_WRITER | PARTIAL_REEXPORTS,
    "accelerate.utils.launch": all_names("commands.config.config_args") | COMMON_NAMES,
}

NAMES = PublicNames(
    "accelerate", NAME_SOURCES, REEXPORTS, complete_modules=("accelerate", "accelerate.utils")
)
module_hooks = NAMES.module_hooks
