from torch_eaas.ops.active_groups import ActiveGroups as ActiveGroups
from torch_eaas.ops.gemm import grouped_gemm as grouped_gemm
from torch_eaas.ops.gemm import grouped_gemm_fp8 as grouped_gemm_fp8
from torch_eaas.ops.gemm_config import GemmConfig as GemmConfig
from torch_eaas.ops.gemm_config import choose_block_rows as choose_block_rows
from torch_eaas.ops.gemm_tuner import GemmTuner as GemmTuner
from torch_eaas.ops.quantize import quantize_blocks as quantize_blocks
from torch_eaas.ops.shrinking import group_shrink as group_shrink
