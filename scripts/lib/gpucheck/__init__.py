"""What scripts/gpu-check measures: ExLlamaV2 under the gate beside the library by itself, on one machine."""
