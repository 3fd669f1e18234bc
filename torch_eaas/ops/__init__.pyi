from torch_eaas.ops.activation import swiglu as swiglu
from torch_eaas.ops.activation import swiglu_quantize as swiglu_quantize
from torch_eaas.ops.combining import combine as combine
from torch_eaas.ops.packing import pack as pack
from torch_eaas.ops.row_quantizer import quantize_rows as quantize_rows
from torch_eaas.ops.shrinking import group_shrink as group_shrink
