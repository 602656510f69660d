// Continue a prompt greedily with a folder of `weft compile`: dotnet run FOLDER PROMPT NEW_TOKENS
// Package: Microsoft.ML.OnnxRuntimeGenAI
using System;
using Microsoft.ML.OnnxRuntimeGenAI;

static class Run
{
    static int Main(string[] args)
    {
        if (args.Length != 3)
        {
            Console.Error.WriteLine("usage: run FOLDER PROMPT NEW_TOKENS");
            return 2;
        }
        using (var model = new Model(args[0]))
        using (var tokenizer = new Tokenizer(model))
        using (var text = tokenizer.CreateStream())
        using (var prompt = tokenizer.Encode(args[1]))
        using (var options = new GeneratorParams(model))
        {
            options.SetSearchOption("max_length", prompt[0].Length + int.Parse(args[2]));
            using (var generator = new Generator(model, options))
            {
                generator.AppendTokenSequences(prompt);
                while (!generator.IsDone())
                {
                    generator.GenerateNextToken();
                    var sequence = generator.GetSequence(0);
                    Console.Write(text.Decode(sequence[sequence.Length - 1]));
                }
            }
        }
        return 0;
    }
}
