"""A module that writes down which samples it is given, trained by a quiet Trainer, saved at every moment."""

import lightning as L
import torch


class Recorder(L.LightningModule):
    """Writes down which samples it is trained and validated on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated, self.predicted = [], [], []

    def training_step(self, batch):
        self.trained.append((batch.epoch, batch.step, batch.plan.samples.tolist()))
        return (self.weight * torch.rand(1)).sum()

    def validation_step(self, batch):
        self.validated.append(batch.plan.samples.tolist())

    def test_step(self, batch):
        assert batch.step < 5

    def predict_step(self, batch):
        self.predicted += [bytes(batch.microbatches[0].tokens.tolist())]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Recorder):
    """Asks for the number of steps while it makes its optimizer."""

    def configure_optimizers(self):
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def trainer_of(folder, **settings):
    """A Trainer that prints and writes nothing by itself."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return L.Trainer(default_root_dir=folder, **(quiet | {"enable_checkpointing": False} | settings))


def trained(folder, data, checkpoint=None, **settings):
    """Epoch, step and samples of every batch of a training."""
    model = Recorder()
    trainer_of(folder, **settings).fit(model, data, ckpt_path=checkpoint, weights_only=True)
    return model.trained


class SaveAlways(L.Callback):
    """Saves a checkpoint at every moment at which one may be saved; its name ends with the steps done."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, moment):
        trainer.save_checkpoint(self.folder / f"{moment}-{trainer.global_step}.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch")
