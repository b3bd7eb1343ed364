"""The backends `dynamo:NAME`: any TorchDynamo backend, through one adapter."""

from torpor.backends.dynamo.compile import DynamoBackend

__all__ = ["DynamoBackend"]
