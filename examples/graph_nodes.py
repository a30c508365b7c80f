"""Time each node in the `torch.fx` graph of a ResNet-18.

    python examples/graph_nodes.py

The model is that of `resnet_inference.py`. It runs on the GPU if there is one.
"""

import torch
from resnet_inference import INPUT, ResNet18

from instrument.graph import profile_graph


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, x = ResNet18().eval().to(device), torch.randn(INPUT, device=device)
    with torch.no_grad():
        profile = profile_graph(model, x, runs=5, warmup=1)
    print(profile)

    print("\nThe slowest nodes, with their source lines:\n")
    slowest = profile.nodes.sort("median_ns").head(5)
    print(slowest.select(["name", "median_ns", "share", "flops_per_second", "intensity", "source"]))

    print("\nBy stage, and by kind of module:\n")
    for table in (profile.by("module_path", depth=1), profile.by("module_type")):
        print(
            table.select([table.columns[0], "nodes", "median_ns", "share", "flops", "new_bytes"]),
            end="\n\n",
        )


if __name__ == "__main__":
    main()
