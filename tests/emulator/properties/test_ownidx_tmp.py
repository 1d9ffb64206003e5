from test_pairs import *
@pytest.mark.parametrize("device", [HOPPER, PORTABLE])
@pytest.mark.parametrize("method", ["naive", "fused", "tiled", "offload"])
@pytest.mark.parametrize("dtype", NEAR)
def test_table(dtype: str, method: str, device: int) -> None:
    rng = np.random.default_rng(0)
    query, key, own = (
        rng.standard_normal((*n, 24)).astype(find_dtype(dtype)) for n in ((40,), (70,), (13,))
    )
    mask, labels = rng.random((40, 9)) < 0.8, rng.integers(0, 70, 40)
    indices = rng.integers(-2, 12, (40, 9)); indices[:, :8][rng.random((40, 8)) < .85] = 5
    own[12] = np.nan
    bias = rng.standard_normal((40, 9))
    for more in (
        {}, {"in_batch": False, "normalize": False}, {"false_negative_margin": 0.1, "hardness": 1.0, "own_bias": bias}, {"own_mask": mask, "own_bias": bias, "normalize": False},
    ):  # fmt: skip
        options: dict[str, Any] = {"scale": 6.0, "normalize": True, **more}
        if not options["normalize"]: options["scale"] = 1.0
        want = reference.info_nce(query, key, labels=labels, own=own, own_indices=indices, **options)
        with cupy.cuda.Device(device):
            place, how = cupy.asarray, {"method": method}
            if method == "offload":
                place, how = np.asarray, {"offload": True, "workspace": 2**15}
            arrays = [place(z) for z in (query, key, labels)]
            options |= {"own": place(own), "own_indices": place(indices), **how}
            for name in ("own_mask", "own_bias"):
                if name in more: options[name] = place(more[name])
            got = infonce.info_nce_loss_and_grad(
                *arrays, grad_dtype=None if dtype == "float64" else np.float32, **options
            )
            again = infonce.info_nce_loss_and_grad(*arrays, wrt=["own", "scale"], **options)
        near(got.loss, want.loss, dtype)
        near(again.grads.scale, want.grads["scale"], dtype)
        for name in ("query", "key", "own", "scale"):
            near(getattr(got.grads, name), want.grads[name], dtype)
