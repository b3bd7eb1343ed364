"""Training loops that others wrote: transformers, accelerate, Lightning, TensorBoard."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.wild.placements import Placement, program
from tests.wild.synthetic import clusters, corpus

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false"
)


class Windows(Dataset):
    """Pieces of a text, with themselves as labels."""

    def __init__(self, count: int, length: int = 12) -> None:
        numbers, _ = corpus()
        self.rows = [numbers[i * 9 :][:length].astype(np.int64) for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index].tolist(), "labels": self.rows[index].tolist()}


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=24, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=31, pad_token_id=30,
    )  # fmt: skip
    torch.manual_seed(1)
    return GPT2LMHeadModel(config)


def _trainer(how: Placement, model: Any, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments: dict[str, Any] = {
        "output_dir": str(how.folder / "run"), "per_device_train_batch_size": 4, "max_steps": 8,
        "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "logging_steps": 1, "seed": 3,
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "warmup_steps": 2, "lr_scheduler_type": "cosine",
    }  # fmt: skip
    return Trainer(
        model=model, args=TrainingArguments(**{**arguments, **changes}), train_dataset=Windows(40),
        eval_dataset=Windows(8), compute_metrics=_right,
    )  # fmt: skip


def _right(prediction: Any) -> dict[str, float]:
    guess = prediction.predictions.argmax(-1)[:, :-1]
    return {"right": float((guess == prediction.label_ids[:, 1:]).mean())}


def _history(trainer: Any, *names: str) -> list[Any]:
    return [
        {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history
    ]


@program(placements=("enable", "lazy"))
def hf_trainer(how: Placement) -> dict[str, Any]:
    """Trainer: accumulation, evaluation, checkpoints, resuming from one, generation."""
    trainer = _trainer(how, how.model(_gpt2()))
    trainer.train()
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "step")
    straight = _history(trainer, *names)
    again = _trainer(how, how.model(_gpt2()))
    again.train(resume_from_checkpoint=str(how.folder / "run" / "checkpoint-4"))
    resumed = _history(again, *names)
    prompt = torch.tensor([[5, 9, 3]])
    model = again.model.eval()
    greedy = model.generate(prompt, max_new_tokens=6, do_sample=False)
    torch.manual_seed(5)
    sampled = model.generate(prompt, max_new_tokens=6, do_sample=True, top_k=5)
    return {
        "straight": straight, "resumed": resumed, "metrics": again.evaluate()["eval_loss"],
        "greedy": greedy.tolist(), "sampled": sampled.tolist(),
    }  # fmt: skip


@program()
def hf_bert(how: Placement) -> dict[str, Any]:
    """BERT in a loop by hand: padded batches, a mask, a linear schedule, saved and loaded again."""
    from transformers import BertConfig, BertForSequenceClassification, get_scheduler

    config = BertConfig(
        vocab_size=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    model = how.model(BertForSequenceClassification(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=10)
    draw, losses = np.random.default_rng(2), []
    model.train()
    for _ in range(10):
        lengths = draw.integers(4, 9, 6)
        ids = torch.zeros(6, 8, dtype=torch.long)
        for row, length in enumerate(lengths):
            ids[row, :length] = torch.from_numpy(draw.integers(1, 32, length))
        batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.sum(1) % 3}
        output = model(**{k: v.to(how.device) for k, v in batch.items()})
        output.loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(batch["input_ids"].to(how.device)).logits
    model.save_pretrained(how.folder / "bert")
    loaded = BertForSequenceClassification.from_pretrained(how.folder / "bert")
    with torch.no_grad():
        again = how.model(loaded).eval()(batch["input_ids"].to(how.device)).logits
    return {"losses": losses, "logits": logits.cpu(), "again": again.cpu()}


@program(placements=("enable", "lazy"))
def accelerated(how: Placement) -> dict[str, Any]:
    """accelerate: prepare, accumulate, gather for metrics, save and load the state."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    points, labels = clusters(96)
    data = TensorDataset(torch.from_numpy(points), torch.from_numpy(labels))
    model = how.model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=12, shuffle=True), schedule
    )
    losses = []
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if epoch == 1:
            accelerator.save_state(str(how.folder / "state"))
    last = accelerator.get_state_dict(model)
    accelerator.load_state(str(how.folder / "state"))
    guesses = []
    for x, y in loader:
        with torch.no_grad():
            guess, truth = accelerator.gather_for_metrics((model(x).argmax(-1), y))
        guesses.append(int((guess == truth).sum()))
    accelerator.end_training()
    return {"losses": losses, "last": last, "guesses": guesses}


def _lightning_module(how: Placement) -> Any:
    import pytorch_lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            said = self.net(batch[0])
            self.log("valid_loss", F.cross_entropy(said, batch[1]))
            self.log("valid_right", (said.argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return how.model(Classifier())


@program(placements=("enable", "lazy"))
def lightning(how: Placement) -> dict[str, Any]:
    """Lightning: fit, a checkpoint of the best, and going on from the last."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    points, labels = clusters(96)
    data = TensorDataset(torch.from_numpy(points), torch.from_numpy(labels))
    train, valid = DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=32)

    def fit(epochs: int, checkpoint: str | None) -> tuple[Any, Any]:
        pl.seed_everything(7, verbose=False)
        keep = ModelCheckpoint(how.folder, monitor="valid_loss", save_last=True)
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[keep, EarlyStopping("valid_loss", patience=3)],
            gradient_clip_val=1.0, num_sanity_val_steps=1, accumulate_grad_batches=1,
        )  # fmt: skip
        module = _lightning_module(how)
        trainer.fit(module, train, valid, ckpt_path=checkpoint)
        return module, trainer

    first, trainer = fit(2, None)
    metrics = {k: float(v) for k, v in sorted(trainer.callback_metrics.items())}
    second, trainer = fit(4, str(how.folder / "last.ckpt"))
    return {
        "losses": first.losses, "metrics": metrics, "resumed": second.losses,
        "epoch": trainer.current_epoch, "state": second.net.state_dict(),
        "validated": trainer.validate(second, valid, verbose=False),
    }  # fmt: skip


@program()
def tensorboard(how: Placement) -> dict[str, Any]:
    """Scalars, histograms and pictures to event files; read back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    points, labels = clusters(64)
    x, y = torch.from_numpy(points).to(how.device), torch.from_numpy(labels).to(how.device)
    model = how.model(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SummaryWriter(str(how.folder / "events")) as writer:
        for step in range(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss, step)
            for name, p in model.named_parameters():
                writer.add_histogram(name, p, step)
                writer.add_histogram(f"{name}.grad", p.grad, step)
        writer.add_image("weights", model[0].weight.detach().sigmoid().unsqueeze(0), 0)
    events = EventAccumulator(str(how.folder / "events"), {"histograms": 0}).Reload()
    histogram = events.Histograms("0.weight")[-1].histogram_value
    return {
        "losses": [e.value for e in events.Scalars("loss")], "max": histogram.max,
        "tags": sorted(events.Tags()["histograms"]), "sum": histogram.sum,
    }  # fmt: skip
