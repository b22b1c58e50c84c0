"""What an allocation is for."""

#: What an allocation is for. What no one says more of is of the phase that it was made in.
KINDS = (
    "other",
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "inputs",
    "workspaces",
    "backward pass",
    "optimizer step",
    "buckets of gradients",
)
OTHER, PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS = range(5)
INPUTS, WORKSPACES, BACKWARD_PASS, OPTIMIZER_STEP, BUCKETS = range(5, 10)
#: What a program makes once, and not in each step, unless it gives as much back.
MADE_ONCE = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, WORKSPACES)
