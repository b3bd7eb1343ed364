"""The conformance kit: what a backend must do, as tests that run on any backend.

    pytest --pyargs torpor.testing --backend acme
    torpor conformance acme --html report.html

The sections are `test_contract` (the methods of `Backend`), `test_buffers` (backend-owned data and
devices, fallbacks, decompositions, `torch.compile`), `test_laziness` (what runs, when, how often),
`test_errors` (what the user sees when something fails), `test_models` (training runs) and
`test_operators` (torch's own operator table). All of them compare with eager PyTorch.

Nothing in torpor imports this package, and only running it needs pytest.
"""
