"""Models of sound."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

from bench.programs._shared import Step, cast, configured, convolved, module, training

# Nothing is left out by chance, which would draw what runs, and on what sizes.
SPEECH: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
SPEECH |= {"intermediate_size": 2048, "layerdrop": 0.0, "mask_time_prob": 0.0}


def wavenet(torch: Any) -> Step:
    """Gated convolutions, each twice as dilated as the one before, foretell the next sample."""
    nn = torch.nn
    dilations = [2**i for i in range(9)] * 2

    def layer(dilation: int) -> Any:
        gated = nn.Conv1d(64, 128, 2, dilation=dilation)
        return nn.ModuleList([gated, nn.Conv1d(64, 64, 1), nn.Conv1d(64, 128, 1)])

    head = nn.Sequential(nn.ReLU(), nn.Conv1d(128, 256, 1), nn.ReLU(), nn.Conv1d(256, 256, 1))
    parts = {"embed": nn.Embedding(256, 64), "head": head}
    parts["layers"] = nn.ModuleList(map(layer, dilations))
    sound = torch.randint(256, (4, 8001), device="cuda")

    def forward(self: Any, sound: Any) -> Any:
        x, skipped = self.embed(sound).mT, 0
        for dilation, (gated, residual, skip) in zip(dilations, self.layers, strict=True):
            filtered, gate = gated(nn.functional.pad(x, (dilation, 0))).chunk(2, 1)
            y = torch.tanh(filtered) * torch.sigmoid(gate)
            x, skipped = x + residual(y), skipped + skip(y)
        return self.head(skipped)

    def loss_of(model: Any) -> Any:
        return nn.functional.cross_entropy(model(sound[:, :-1]), sound[:, 1:])

    model = module(torch, forward, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def separates_speakers(torch: Any) -> Step:
    """Learned filters, depthwise dilated convolutions that give two masks, filters backwards."""
    nn = torch.nn

    def block(dilation: int) -> Any:
        depthwise = {"padding": dilation, "dilation": dilation, "groups": 256}
        return nn.Sequential(
            nn.Conv1d(128, 256, 1),
            nn.PReLU(),
            nn.GroupNorm(1, 256),
            nn.Conv1d(256, 256, 3, **depthwise),
            nn.PReLU(),
            nn.GroupNorm(1, 256),
            nn.Conv1d(256, 128, 1),
        )

    parts = {
        "encoder": nn.Conv1d(1, 256, 16, stride=8, bias=False),
        "narrow": nn.Sequential(nn.GroupNorm(1, 256), nn.Conv1d(256, 128, 1)),
        "blocks": nn.ModuleList(block(2**i) for _ in range(2) for i in range(6)),
        "masks": nn.Conv1d(128, 512, 1),
        "decoder": nn.ConvTranspose1d(256, 1, 16, stride=8, bias=False),
    }
    voices = torch.randn(4, 2, 16000, device="cuda")

    def forward(self: Any, mixed: Any) -> Any:
        read = self.encoder(mixed)
        x = self.narrow(read)
        for one in self.blocks:
            x = x + one(x)
        masks = self.masks(x).sigmoid().unflatten(1, (2, 256))
        return self.decoder((masks * read[:, None]).flatten(0, 1)).view(len(mixed), 2, -1)

    def loss_of(model: Any) -> Any:
        """The ratio of noise in the better of the two ways to name the speakers."""
        found = model(voices.sum(1, keepdim=True))
        errors = [(found - named).square().sum(-1) for named in (voices, voices.flip(1))]
        ratios = [(error / voices.square().sum(-1)).log10().mean(1) for error in errors]
        return 10 * torch.minimum(*ratios).mean()

    model = module(torch, forward, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def spectrograms(torch: Any) -> Step:
    """Words are told apart by convolutions over the power of frequencies, in decibels."""
    nn = torch.nn
    widths = 1, 64, 128, 256, 512
    layers: list[Any] = []
    for before, after in itertools.pairwise(widths):
        layers += [convolved(torch, before, after), nn.MaxPool2d(2)]
    top = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 35)
    model = nn.Sequential(*layers, *top).cuda()
    window = torch.hann_window(512, device="cuda")
    sounds = torch.randn(64, 16000, device="cuda")
    words = torch.randint(35, (64,), device="cuda")

    def loss_of(model: Any) -> Any:
        spectrum = torch.stft(sounds, 512, 128, window=window, return_complex=True)
        decibels = 10 * spectrum.abs().square().clamp_min(1e-10).log10()
        return nn.functional.cross_entropy(model(decibels[:, None]), words)

    return training(torch, model, loss_of, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9)


def conformer_hears(torch: Any) -> Step:
    """Mel spectrograms, partly masked, a conformer of torchaudio, and letters by CTC."""
    nn, torchaudio = torch.nn, importlib.import_module("torchaudio")
    mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=512, hop_length=160, n_mels=80).cuda()
    body = torchaudio.models.Conformer(256, 4, 1024, 6, 31)
    parts = {"first": nn.Linear(160, 256), "body": body, "head": nn.Linear(256, 32)}
    masks = nn.Sequential(
        torchaudio.transforms.FrequencyMasking(15), torchaudio.transforms.TimeMasking(35)
    )
    sounds = torch.randn(8, 80000, device="cuda")
    letters = torch.randint(1, 32, (8, 60), device="cuda")
    spoken = torch.full((8,), 60, device="cuda")

    def loss_of(model: Any) -> Any:
        with torch.no_grad():
            heard = masks((mel(sounds) + 1e-6).log())[..., :500]
        paired = heard.mT.reshape(8, 250, 160)
        lengths = torch.full((8,), 250, device="cuda")
        read, lengths = model.body(model.first(paired), lengths)
        likely = model.head(read).log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(likely, letters, lengths, spoken, zero_infinity=True)

    return training(torch, module(torch, loss_of, **parts), loss_of)


def wav2vec2(torch: Any) -> Step:
    """Raw sound, with a frozen extractor of features, and letters by CTC."""
    model = configured("Wav2Vec2", "ForCTC", **SPEECH)
    model.freeze_feature_encoder()
    sounds = torch.randn(8, 48000, device="cuda")
    letters = torch.randint(1, 32, (8, 30), device="cuda")
    return training(torch, model, lambda model: model(sounds, labels=letters).loss)


def hubert(torch: Any) -> Step:
    """Finds the emotion in speech, in half precision."""
    model = configured("Hubert", "ForSequenceClassification", **SPEECH, num_labels=7)
    sounds = torch.randn(8, 48000, device="cuda")
    moods = torch.randint(7, (8,), device="cuda")
    loss_of = cast(torch, torch.float16, lambda model: model(sounds, labels=moods).loss)
    return training(torch, model, loss_of, scaler=torch.amp.GradScaler(), lr=1e-5)


def whisper(torch: Any) -> Step:
    """Half a minute of speech and what was said, with checkpoints."""
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "d_model": 384}
    layers = {"encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 1536}
    model = configured(
        "Whisper", "ForConditionalGeneration", **heads, **layers, decoder_ffn_dim=1536
    )
    model.gradient_checkpointing_enable()
    sounds = torch.randn(4, 80, 3000, device="cuda")
    words = torch.randint(50257, (4, 64), device="cuda")
    loss_of = cast(torch, torch.bfloat16, lambda model: model(sounds, labels=words).loss)
    return training(torch, model, loss_of, fused=True)


def hears_commands(torch: Any) -> Step:
    """Convolutions over the waves themselves, of words a second long."""
    nn = torch.nn
    layers: list[Any] = []
    for before, after, width, stride in ((1, 128, 80, 4), (128, 128, 3, 1), (128, 256, 3, 1)):
        layers += [nn.Conv1d(before, after, width, stride), nn.BatchNorm1d(after), nn.ReLU()]
        layers += [nn.MaxPool1d(4)]
    layers += [nn.Conv1d(256, 512, 3), nn.BatchNorm1d(512), nn.ReLU(), nn.MaxPool1d(4)]
    head = nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(512, 35), nn.LogSoftmax(1)
    model = nn.Sequential(*layers, *head).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.1)
    waves = torch.randn(256, 1, 16000)
    words = torch.randint(35, (256,))
    coarser = importlib.import_module("torchaudio").transforms.Resample(16000, 8000).cuda()

    def step() -> float:
        said = model(coarser(waves.to("cuda")))
        loss = nn.functional.nll_loss(said, words.to("cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        return float(loss.item())

    return step


def speaks(torch: Any) -> Step:
    """A cell that looks at a text, at places that it has looked at before, says frames of sound;
    convolutions mend what it said."""
    nn, functional = torch.nn, torch.nn.functional

    def convs(*widths: int) -> Any:
        layers: list[Any] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv1d(before, after, 5, padding=2), nn.BatchNorm1d(after)]
            layers += [nn.Tanh(), nn.Dropout(0.5)]
        return nn.Sequential(*layers[:-2])

    parts = {
        "embed": nn.Embedding(80, 256),
        "convs": convs(256, 256, 256, 256),
        "encoder": nn.LSTM(256, 128, batch_first=True, bidirectional=True),
        "narrow": nn.Sequential(nn.Linear(80, 128), nn.ReLU(), nn.Dropout(0.5)),
        "looks": nn.LSTMCell(128 + 256, 512),
        "query": nn.Linear(512, 128, bias=False),
        "key": nn.Linear(256, 128, bias=False),
        "where": nn.Conv1d(2, 32, 31, padding=15, bias=False),
        "place": nn.Linear(32, 128, bias=False),
        "score": nn.Linear(128, 1, bias=False),
        "cell": nn.LSTMCell(512 + 256, 512),
        "frame": nn.Linear(512 + 256, 80),
        "ends": nn.Linear(512 + 256, 1),
        "mends": convs(80, 256, 256, 80),
    }
    letters = torch.randint(80, (32, 64), device="cuda")
    frames = torch.randn(32, 80, 80, device="cuda")
    last = torch.zeros(32, 80, device="cuda")
    last[:, -1] = 1

    def forward(self: Any, letters: Any, frames: Any) -> Any:
        read, _state = self.encoder(self.convs(self.embed(letters).mT).mT)
        keys, batch = self.key(read), len(letters)
        seen, attended = read.new_zeros(batch, 256), read.new_zeros(batch, 64)
        total, first, second, said = attended, None, None, []
        for frame in self.narrow(functional.pad(frames, (0, 0, 1, 0))[:, :-1]).unbind(1):
            first = self.looks(torch.cat([frame, seen], 1), first)
            places = self.place(self.where(torch.stack([attended, total], 1)).mT)
            scores = self.score(torch.tanh(self.query(first[0])[:, None] + keys + places))
            attended = scores.squeeze(2).softmax(1)
            total = total + attended
            seen = torch.bmm(attended[:, None], read).squeeze(1)
            second = self.cell(torch.cat([first[0], seen], 1), second)
            said.append(torch.cat([second[0], seen], 1))
        states = torch.stack(said, 1)
        sound = self.frame(states)
        return sound, sound + self.mends(sound.mT).mT, self.ends(states).squeeze(2)

    def loss_of(model: Any) -> Any:
        sound, mended, ends = model(letters, frames)
        wrong = functional.mse_loss(sound, frames) + functional.mse_loss(mended, frames)
        return wrong + functional.binary_cross_entropy_with_logits(ends, last)

    model = module(torch, forward, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3, weight_decay=1e-6)
