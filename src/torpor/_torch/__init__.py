"""Everything torpor uses of torch's internals: one module per subject, re-exported here.

Other packages use the names below as `_torch.name`. They need not know which module defines a
name, and a test that replaces one here replaces it for all of them. If a new torch release moves a
private name, one module breaks, and the test of the same name in `tests/unit/torch_internals/` says
which. These modules import only `dispatch`, `import_hooks`, `fakes` and `uses` from each other.
"""

from torpor._torch.autograd import (
    autocast_states,
    backward_keeps_graph,
    backward_passes,
    compiled_node,
    current_autograd_node,
    end_gradients,
    had_unusual_backward,
    has_gradient_hooks,
    has_saved_tensors_hooks,
    has_tangent,
    is_differentiating_forward,
    is_held,
    is_in_backward,
    is_profiler_on,
    is_profiler_on_this_thread,
    may_change,
    next_sequence_number,
    on_higher_derivatives,
    pass_gradients_on,
    profiler_span,
)
from torpor._torch.devices import (
    accept_lazy_attention,
    accept_lazy_autocast,
    accept_lazy_losses,
    attention_choice,
    attention_switches,
    cuda_stream,
    end_allocating_to_pool,
    finish_gpu,
    forget_cublas_workspaces,
    is_data_worker,
    on_default_dtype,
    register_device_module,
    torch_lazy_system,
)
from torpor._torch.dispatch import (
    DispatchMode,
    above_autograd,
    as_on_another_thread,
    below_autograd,
    disabled_torch_function,
    is_any_autocast_on,
    is_python_off,
    is_tracing,
    is_transforming,
    kernels,
    modes,
    python_on,
    without_autocast,
    without_dispatch_modes,
    without_modes,
    without_torch_function,
)
from torpor._torch.distributed import (
    finished_work,
    gloo_group,
    group_in,
    is_distributed,
    is_fake_group,
    on_data_parallel,
    rank_and_world,
    ranks_of_group,
    reduction,
    reduction_in,
    resolve_group,
    store_of,
)
from torpor._torch.dtensor import is_dtensor, local_part, of_local_part, wait_at_once
from torpor._torch.dynamo import (
    CAPTURING,
    Captured,
    GraphOps,
    LazyFrames,
    as_if_not_compiled,
    detach_what_has_no_gradient,
    dynamo_backends,
    dynamo_compiler,
    dynamo_graphs,
    dynamo_training_backend,
    keep_lazy_tangents,
    on_dynamo_frame,
    region_backend,
    take_ops_apart_as_eager_does,
)
from torpor._torch.fakes import (
    among_fakes,
    data_dependent_errors,
    fake_mode,
    fakes_by_decomposition,
    give_fake,
    has_fake,
    make_fakes_with,
    make_fx_takes,
    new_fake_mode,
    quiet_fakes,
    tracing_with,
    type_source,
    unsupported_errors,
)
from torpor._torch.fsdp import has_lazy_shard, on_fully_shard
from torpor._torch.generators import (
    accept_lazy_states,
    leave_states_alone,
    set_cuda_states_by_copies,
)
from torpor._torch.import_hooks import after_import, replace_function
from torpor._torch.inductor import (
    inductor_compile,
    inductor_decompositions,
    inductor_module,
    inductor_options,
    inductor_pickle,
    inductor_prefers_channels_last,
    inductor_settings,
    inductor_unpickle,
    last_traced_node,
    ops_inductor_refused,
)
from torpor._torch.inductor_kernels import (
    best_vectors_work,
    forget_inductor_threads,
    kernels_in_background,
    start_inductor_workers,
    try_best_vectors,
)
from torpor._torch.modules import (
    ModuleCall,
    after_zero_grad,
    has_hooks,
    is_compiled,
    module_attributes,
    on_compile,
    on_move,
    on_parameter_groups,
    on_registration,
    prefer_foreach,
    register_step_hook,
    register_step_pre_hook,
    wrap_module_call,
    wrap_outermost_call,
)
from torpor._torch.ops import (
    Kernels,
    OpOverload,
    OpOverloadPacket,
    composite_ops_with_cpu_kernels,
    custom_op_overload,
    define_ops,
    drop_op_attribute,
    factory_ops,
    is_composite,
    is_op,
    is_size,
    is_taken_op_name,
    kernel,
    kernel_object,
    on_higher_order_op,
    op_table,
    ops_in,
    parse_schema,
    set_op_attribute,
    source_of_op,
    take_apart,
    torch_decompositions,
    tree_leaves,
    tree_map,
)
from torpor._torch.optimizers import ForeachCalls as ForeachCalls
from torpor._torch.optimizers import around_adam as around_adam
from torpor._torch.optimizers import count_a_step as count_a_step
from torpor._torch.optimizers import has_function_modes as has_function_modes
from torpor._torch.optimizers import replace_step as replace_step
from torpor._torch.sizes import OpenSizes, fold_known_sizes
from torpor._torch.storages import (
    has_other_users,
    memory_of,
    rebuild_parameter,
    rebuild_tensor,
    shares_memory,
    typed_storage,
    untyped,
    users_of,
    weak_memories,
    window_on,
)
from torpor._torch.tensors import (
    copy_each,
    dispatch_keys,
    has_own_dispatch,
    lazy_keys,
    make_wrapper,
    on_set_data,
    on_subclass,
    set_conj,
    set_metadata,
    set_neg,
    swap,
    wrapped_number,
)
from torpor._torch.torchscript import (
    SCRIPT_MEMORY_FORMATS,
    SCRIPT_TYPES,
    on_script_call,
    on_script_move,
    on_script_save,
    script_as_drawn,
    script_dtype,
    script_function,
    script_graph,
    script_has_constants,
    script_module,
    script_owner,
    script_tensors,
)
from torpor._torch.translation_units import load_kernel as load_kernel
from torpor._torch.uses import Uses, autocast_copy, gradients_of_results, without_results
