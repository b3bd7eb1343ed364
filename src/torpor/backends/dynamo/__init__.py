"""The backends `dynamo:NAME`: any of TorchDynamo's backends, through one adapter."""

from torpor.backends.dynamo.compile import DynamoBackend

__all__ = ["DynamoBackend"]
