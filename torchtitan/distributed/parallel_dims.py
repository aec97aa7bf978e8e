"""The axes of the job: their degrees and their meshes, in one place."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ParallelDims:
    """Degrees and meshes; rank = dp_rank * cp + cp_rank, so the ranks of a cp group are neighbours.

    So are those that exchange heads by Ulysses: cp_rank = rank of the method * ulysses + rank of Ulysses.
    """

    dp_shard: int
    cp: int
    ulysses: int  # ranks of cp that exchange heads; 1: none
    cp_mesh: DeviceMesh  # [cp], or [cp / ulysses, ulysses]: its members hold parts of the same sequences
    fsdp_mesh: DeviceMesh  # [dp_shard x cp]: parameters, gradients and token counts are spread over it
    dp_rank: int  # which samples of the global batch are this rank's
    cp_rank: int

    def table(self, *, global_batch_size: int, local_batch_size: int, seq_len: int) -> str:
        """Return the resolved layout as lines of text, for the log."""
        accumulation = global_batch_size // (local_batch_size * self.dp_shard)
        rows = [
            ("ranks", f"{self.dp_shard * self.cp} = dp_shard {self.dp_shard} x cp {self.cp}"),
            (
                "global batch",
                f"{global_batch_size} sequences = {self.dp_shard} dp ranks x {local_batch_size} x {accumulation} "
                "microbatches",
            ),
            ("tokens per step", f"{global_batch_size * seq_len:,} = {global_batch_size} x seq_len {seq_len:,}"),
            (
                "tokens per rank",
                f"{local_batch_size * seq_len // self.cp:,} of a microbatch (seq_len / cp = {seq_len // self.cp:,})",
            ),
            ("mesh cp", f"{self._cp_shape()} ranks: each sequence is cut over them"),
            ("mesh fsdp", f"{self.dp_shard * self.cp} ranks: parameters are sharded over them"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)

    def meshes(self) -> list[DeviceMesh]:
        """Return all meshes of one dim, those within the cp mesh included."""
        names = self.cp_mesh.mesh_dim_names or ()
        parts = [self.cp_mesh] if self.cp_mesh.ndim == 1 else [self.cp_mesh[name] for name in names]
        return [self.fsdp_mesh, *parts]

    def _cp_shape(self) -> str:
        return f"{self.cp // self.ulysses} x {self.ulysses} (Ulysses)" if self.ulysses > 1 else str(self.cp)


def build_parallel_dims(device: torch.device, *, dp_shard: int, cp: int, ulysses: int = 1) -> ParallelDims:
    """Return the axes of this job; collective: every rank of the world must call it."""
    if ulysses == 1:
        cp_mesh = init_device_mesh(device.type, (dp_shard, cp), mesh_dim_names=("dp_shard", "cp"))["cp"]
    else:
        shape, names = (dp_shard, cp // ulysses, ulysses), ("dp_shard", "cp", "ulysses")
        cp_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)["cp", "ulysses"]
    # A mesh of its own rather than a flattened one: those are made by private names that changed between versions.
    fsdp_mesh = init_device_mesh(device.type, (dp_shard * cp,), mesh_dim_names=("fsdp",))
    dp_rank, cp_rank = divmod(fsdp_mesh.get_local_rank(), cp)
    return ParallelDims(dp_shard, cp, ulysses, cp_mesh, fsdp_mesh, dp_rank, cp_rank)
